"""Chat sessions: in the tokenizer's chat template, or about images as the training's dataset puts them."""

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
    """A conversation that goes on, in the tokenizer's chat template or as the training's dataset puts it."""

    prompt: Callable[[Conversation, list[Any]], Sample]  # of messages and their images; UserError where it has none
    ends: Collection[int]  # tokens that end an answer
    takes_images: bool
    images: list[Any] = field(default_factory=list)  # PIL
    waiting: int = 0  # images that no message has mentioned
    history: Conversation = field(default_factory=list)

    @staticmethod
    def in_template(encoders: Encoders, tokenizer: Any) -> ChatSession:
        """A session in the tokenizer's chat template."""

        def prompt(messages: Conversation, _: list[Any]) -> Sample:
            turns = [{"role": message.role, "content": message.text} for message in messages]
            return as_prompt(encoders.encode("chat", turns), tokenizer.eos_token_id)

        return ChatSession(prompt, encoders.ends(tokenizer), takes_images=False)

    @staticmethod
    def about(files: list[str], config: Config, checkpoint: Path, encoders: Encoders | None = None) -> ChatSession:
        """A session that begins with these image files, in the configured dataset's format.

        Raises UserError where the dataset has no conversations, or no usable format.
        """
        component = training_dataset(config)
        # Processors may be none for images, or have values that no library takes.
        with explained(f"{checkpoint}: its dataset {component.name} cannot ask"), limited_to(config.trust):
            builder = prompt_builder(component, checkpoint)
        if encoders is not None:
            builder.encoder.encode_text = partial(encoders.encode, "words")
        return ChatSession(builder.ask, [builder.end_id], True, [_open(file) for file in files], len(files))

    @staticmethod
    def possible(config: Config, checkpoint: Path, encoders: Encoders) -> ChatSession | None:
        """A session without images so far; None where the model was not trained on conversations."""
        try:
            return ChatSession.about([], config, checkpoint, encoders)
        except UserError:
            return None

    @property
    def commands(self) -> str:
        """The commands and what they do."""
        return "`image FILE` adds an image, `new` starts over" if self.takes_images else "`new` starts over"

    def ask(self, text: str) -> Sample:
        """The prompt for an answer to `text`."""
        return self.prompt([*self.history, self.message(text)], self.images)

    def remember(self, text: str, answer: str) -> None:
        """Add an exchange to the history."""
        self.history += [self.message(text), Message("assistant", answer)]
        self.waiting = 0

    def command(self, text: str) -> bool:
        """Run the command that `text` is; False if it is none."""
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
        """A user's words, with the placeholders of the images that no message has mentioned."""
        if not self.takes_images or text.count(IMAGE) == self.waiting:  # at places of the user's choice
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
