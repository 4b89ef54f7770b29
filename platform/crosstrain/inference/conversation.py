"""Chat sessions in the tokenizer's chat template or, with images, in the format of the training dataset."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from crosstrain.config.load import Config
from crosstrain.data.splits import training_dataset
from crosstrain.data.vision.conversations import IMAGE, Conversation, Message, SampleError
from crosstrain.data.vision.image_dataset import prompt_builder
from crosstrain.inference.encoding import Encoders
from crosstrain.inference.generation import as_prompt
from crosstrain.utils.errors import UserError, explained, os_errors_as, printable
from crosstrain.utils.files import read_regular
from crosstrain.utils.trust import limited_to
from crosstrain.utils.types import Sample


@dataclass
class ChatSession:
    """A conversation in the tokenizer's chat template or in the format of the training dataset."""

    prompt: Callable[[Conversation, list[Any]], Sample]  # formats messages and images; may raise UserError
    ends: Collection[int]  # tokens that end an answer
    takes_images: bool
    images: list[Any] = field(default_factory=list)  # PIL images
    waiting: int = 0  # number of images that no message contains yet
    history: Conversation = field(default_factory=list)

    @staticmethod
    def in_template(encoders: Encoders, tokenizer: Any) -> ChatSession:
        """Start a session in the tokenizer's chat template."""

        def prompt(messages: Conversation, _: list[Any]) -> Sample:
            turns = [{"role": message.role, "content": message.text} for message in messages]
            return as_prompt(encoders.encode("chat", turns), tokenizer.eos_token_id)

        return ChatSession(prompt, encoders.ends(tokenizer), takes_images=False)

    @staticmethod
    def about(files: list[str], config: Config, checkpoint: Path, encoders: Encoders | None = None) -> ChatSession:
        """Start a session about these image files, in the configured dataset's format.

        Raises UserError if the dataset has no conversations or no usable format.
        """
        component = training_dataset(config)
        # The configured processor may not support images, or a library may reject its options.
        with explained(f"{checkpoint}: its dataset {component.name} cannot ask"), limited_to(config.trust):
            builder = prompt_builder(component, checkpoint)
        if encoders is not None:
            builder.encoder.encode_text = partial(encoders.encode, "words")
        return ChatSession(builder.ask, [builder.end_id], True, [_open(file) for file in files], len(files))

    @staticmethod
    def possible(config: Config, checkpoint: Path, encoders: Encoders) -> ChatSession | None:
        """Start a session that has no images yet; None if the model was not trained on conversations."""
        try:
            return ChatSession.about([], config, checkpoint, encoders)
        except UserError:
            return None

    @property
    def commands(self) -> str:
        """One line of help on the commands."""
        return "`image FILE` adds an image, `new` starts over" if self.takes_images else "`new` starts over"

    def ask(self, text: str) -> Sample:
        """Format the prompt for an answer to `text`."""
        return self.prompt([*self.history, self.message(text)], self.images)

    def remember(self, text: str, answer: str) -> None:
        """Add an exchange to the history."""
        self.history += [self.message(text), Message("assistant", answer)]
        self.waiting = 0

    def command(self, text: str) -> bool:
        """Run `text` if it is a command; return False if it is not."""
        word, _, rest = text.strip().partition(" ")
        if word == "image" and rest and self.takes_images:
            self.images.append(_open(rest))
            self.waiting += 1
            print(f"added {printable(rest)}; your next words are about {self.waiting} image(s)")
        elif text.strip() == "new":
            self.history, self.images, self.waiting = [], [], 0
        else:
            return False
        return True

    def message(self, text: str) -> Message:
        """Make a user message, with placeholders for the waiting images."""
        if not self.takes_images or text.count(IMAGE) == self.waiting:  # the user placed the images
            return Message("user", text)
        return Message("user", IMAGE * self.waiting + text.replace(IMAGE, ""))


def _open(file: str) -> Any:
    from crosstrain.data.vision.image import LARGEST_IMAGE, open_image

    with os_errors_as(UserError, f"--image: {file} is not a readable image"):
        data = read_regular(file, LARGEST_IMAGE)
    try:
        return open_image(data, file)
    except SampleError as error:
        raise UserError(f"--image: {error}") from None
