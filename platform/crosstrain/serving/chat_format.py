"""Prompts: a request's conversation in the format that the model knows, as token ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from crosstrain.data.vision.conversations import IMAGE, Message
from crosstrain.data.vision.prompts import PromptBuilder
from crosstrain.inference.encoding import Encoders
from crosstrain.utils.types import Sample


@dataclass(frozen=True)
class Prompt:
    """A sample without labels, and what ends the text that follows."""

    sample: Sample
    ends: frozenset[int]  # tokens
    stops: tuple[str, ...] = ()
    strip: bool = False  # blanks at the beginning of the text do not count

    @property
    def ids(self) -> list[int]:
        return self.sample["input_ids"].tolist()


@dataclass(frozen=True)
class Turn:
    """Somebody's words, with images (PIL) where they stand among them."""

    role: str  # system, user or assistant
    parts: list[Any] = field(default_factory=list)  # texts and images

    @property
    def images(self) -> list[Any]:
        return [part for part in self.parts if not isinstance(part, str)]

    @property
    def text(self) -> str:
        return "".join(part for part in self.parts if isinstance(part, str))


class ChatFormat(Protocol):
    """How a conversation becomes a prompt. Raises ApiError where it cannot."""

    sees: bool
    name: str

    def __call__(self, turns: Sequence[Turn]) -> Prompt: ...


class Trained:
    """As the model was asked in training, images among the words. Written marks of images are only text."""

    sees = True
    name = "as in training"

    def __init__(self, builder: PromptBuilder) -> None:
        self._builder = builder

    def __call__(self, turns: Sequence[Turn]) -> Prompt:
        messages = []
        for turn in turns:
            words = [part.replace(IMAGE, "") if isinstance(part, str) else IMAGE for part in turn.parts]
            messages.append(Message(turn.role, "".join(words)))  # type: ignore[arg-type]
        sample = self._builder.ask(messages, [image for turn in turns for image in turn.images])
        return Prompt(sample, frozenset({self._builder.end_id}), strip=True)


class Template:
    """The tokenizer's own chat template, which transformers renders in a sandbox."""

    sees = False
    name = "the tokenizer's template"

    def __init__(self, encoders: Encoders, end: int) -> None:
        self._encoders, self._end = encoders, end

    def __call__(self, turns: Sequence[Turn]) -> Prompt:
        messages = [{"role": turn.role, "content": turn.text} for turn in turns]
        return _prompt(self._encoders.encode("chat", messages), self._end)


class Plain:
    """For models that know no conversations: `User: ...` and `Assistant: ...` on lines of their own."""

    sees = False
    name = "plain turns"
    _NAMES = {"system": "System", "user": "User", "assistant": "Assistant"}

    def __init__(self, encoders: Encoders, end: int) -> None:
        self._encoders, self._end = encoders, end

    def __call__(self, turns: Sequence[Turn]) -> Prompt:
        lines = [f"{self._NAMES[turn.role]}: {turn.text.strip()}\n" for turn in turns]
        ids = self._encoders.encode("text", "".join([*lines, "Assistant:"]))
        return _prompt(ids, self._end, tuple(f"\n{name}:" for name in self._NAMES.values()), strip=True)


def chat_format(tokenizer: Any, builder: PromptBuilder | None, encoders: Encoders) -> ChatFormat:
    """As in training if there were conversations, else the tokenizer's template, else plain turns."""
    if builder is not None:
        return Trained(builder)
    return (Template if tokenizer.chat_template else Plain)(encoders, tokenizer.eos_token_id)


def completion_prompt(encoders: Encoders, given: str | list[int], end: int) -> Prompt:
    """A text, or its tokens, to go on from; nothing is the end of a text, after which another begins."""
    return _prompt(encoders.encode("text", given) if isinstance(given, str) else given, end)


def _prompt(ids: list[int], end: int, stops: tuple[str, ...] = (), strip: bool = False) -> Prompt:
    return Prompt({"input_ids": np.array(ids or [end], np.int64)}, frozenset({end}), stops, strip)
