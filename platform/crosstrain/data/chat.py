"""Conversations, and prompts made from conversations in the format of a dataset."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from crosstrain.utils.types import Sample

EncodeText = Callable[[str], list[int]]  # text -> token IDs, without special tokens


class SampleError(Exception):
    """A sample that cannot be used, with the reason. The dataset decides whether to skip it."""


@dataclass(frozen=True)
class Message:
    """One turn. `text` has a placeholder for each file that the turn is about; the dataset defines the placeholder."""

    role: Literal["system", "user", "assistant"]
    text: str
    learned: bool = True  # False: the turn is only context


Conversation = list[Message]


class PromptBuilder(ABC):
    """Builds prompts from conversations; the prompts have the form of a dataset's samples."""

    end_id: int  # the token that ends an answer

    @abstractmethod
    def ask(self, conversation: Conversation, files: list[Any]) -> Sample:
        """Return a sample without labels that ends where the assistant's next text begins.

        files: results of `open`, one per placeholder in the conversation. Raises UserError if the counts differ.
        """

    @abstractmethod
    def open(self, file: str) -> Any:
        """Read a file that a message is about. Raises UserError if the file cannot be read."""

    @abstractmethod
    def placed(self, text: str, files: int) -> str:
        """Return `text` with `files` placeholders: the user's own if the number is right, else all at the beginning."""
