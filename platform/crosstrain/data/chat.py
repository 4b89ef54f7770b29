"""Conversations, and the form in which a dataset presents them to a model."""

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
    """One turn. `text` has a placeholder for each file that it is about, in the form of its dataset."""

    role: Literal["system", "user", "assistant"]
    text: str
    learned: bool = True  # False: the turn is only context


Conversation = list[Message]


class PromptBuilder(ABC):
    """A builder of prompts from conversations, in the form that a dataset's samples have."""

    end_id: int  # the token that ends an answer

    @abstractmethod
    def ask(self, conversation: Conversation, files: list[Any]) -> Sample:
        """Return a sample without labels that ends where the assistant's next text begins.

        files: results of `open`, one per placeholder in the conversation. Raises UserError if the counts differ.
        """

    @abstractmethod
    def open(self, file: str) -> Any:
        """Read a file that a message is about. Raises UserError if that is impossible."""

    @abstractmethod
    def placed(self, text: str, files: int) -> str:
        """Return a text with this number of placeholders: where the user wrote them, else at the beginning."""
