"""Format the messages and images of a request as a prompt for the model."""

import base64
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from crosstrain import IMAGE, Conversation, Message, Sample, SampleError
from crosstrain.inference.chat_form import ChatForm
from crosstrain.inference.encoding import Encoders

from .api_error import wrong
from .limits import Limits
from .requests import ChatMessage, ImagePart, TextPart

_PLAIN_TURNS = "{% for m in messages %}{{ m.role | capitalize }}: {{ m.content | trim }}\n{% endfor %}Assistant:"
_NEXT_TURNS = ("\nSystem:", "\nUser:", "\nAssistant:")  # strings that end an answer in plain turns
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")  # accepted image formats


@dataclass(frozen=True)
class Prompt:
    """A sample without labels, and the conditions that end its completion."""

    sample: Sample
    ends: Collection[int]  # tokens that end the completion
    stops: tuple[str, ...] = ()  # strings that end the completion
    strip: bool = False  # strip blanks at the beginning of the completion

    @property
    def ids(self) -> list[int]:
        return self.sample["input_ids"].tolist()


@dataclass(frozen=True)
class ChatFormat:
    """Formats a conversation and its images (PIL) as a prompt."""

    name: str
    form: ChatForm
    stops: tuple[str, ...] = ()
    strip: bool = False

    @property
    def takes_images(self) -> bool:
        """Whether messages may contain images; only the format of a training dataset allows images."""
        return self.form.builder is not None

    def make(self, messages: Conversation, images: list[Any]) -> Prompt:
        """Return the prompt. Raises UserError if the messages cannot be formatted."""
        return Prompt(self.form.prompt(messages, images), self.form.ends, self.stops, self.strip)


def chat_format(tokenizer: Any, trained: ChatForm | None, encoders: Encoders) -> ChatFormat:
    """Return the format that the model was trained on, else the tokenizer's template, else plain turns."""
    if trained is not None:
        return ChatFormat("as in training", trained, strip=True)
    if tokenizer.chat_template:
        return ChatFormat("the tokenizer's template", ChatForm.of_template(encoders))
    tokenizer.chat_template = _PLAIN_TURNS
    return ChatFormat("plain turns", ChatForm.of_template(encoders), _NEXT_TURNS, strip=True)


def conversation(given: list[ChatMessage], takes_images: bool, limits: Limits) -> tuple[Conversation, list[Any]]:
    """Return a request's messages, with placeholders for images, and the images. Raises ApiError 400 for bad images."""
    count = sum(isinstance(part, ImagePart) for message in given for part in message.parts)
    if count and not takes_images:
        raise wrong("messages", "this model does not accept images")
    if count > limits.images:
        raise wrong("messages", f"got {count} images; at most {limits.images} are allowed")
    messages, images = list[Message](), list[Any]()
    for i, message in enumerate(given):
        words = []
        for j, part in enumerate(message.parts):
            if isinstance(part, TextPart):
                # Remove placeholders in the client's text, because only images may have placeholders.
                words.append(part.text.replace(IMAGE, "") if takes_images else part.text)
            else:
                where = f"messages[{i}].content[{j}].image_url.url"
                images.append(picture(part.image_url.url, limits.image_pixels, where))
                words.append(IMAGE)
        messages.append(Message("system" if message.role == "developer" else message.role, "".join(words)))
    return messages, images


def picture(url: str, most_pixels: int, param: str) -> Any:
    """Decode a base64 `data:` URL to an RGB PIL image. Raises ApiError 400 for other URLs, and for invalid data."""
    from crosstrain import ImageTooLarge, open_image

    head, comma, data = url.partition(",")
    if not head.lower().startswith("data:") or not comma:
        raise wrong(
            param, "images are not fetched; send the image itself, as data:image/png;base64,...", "invalid_image_url"
        )
    if not head.lower().endswith(";base64"):
        raise wrong(param, "a data: URL must be base64-encoded", "invalid_base64_image")
    try:
        content = base64.b64decode(data, validate=True)
    except ValueError:  # also raised for non-ASCII characters
        raise wrong(param, "the data is not valid base64", "invalid_base64_image") from None
    try:
        return open_image(content, "this", formats=_FORMATS, most_pixels=most_pixels)
    except ImageTooLarge as error:
        raise wrong(param, str(error), "image_too_large") from None
    except SampleError as error:
        raise wrong(param, f"{error}; supported formats: {', '.join(_FORMATS)}", "invalid_image") from None
