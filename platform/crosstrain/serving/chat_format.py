"""Prompts: a request's conversation in the format that the model knows, as token ids."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from crosstrain.data.vision.conversations import IMAGE, Message
from crosstrain.data.vision.prompts import PromptBuilder
from crosstrain.inference.encoding import Encoders
from crosstrain.inference.generation import as_prompt
from crosstrain.utils.types import Sample

_NAMES = {"system": "System", "user": "User", "assistant": "Assistant"}  # of plain turns


@dataclass(frozen=True)
class Prompt:
    """A sample without labels, and the end of the text that follows it."""

    sample: Sample
    ends: frozenset[int]  # tokens
    stops: tuple[str, ...] = ()
    strip: bool = False  # blanks at the beginning of the text do not count

    @property
    def ids(self) -> list[int]:
        return self.sample["input_ids"].tolist()


@dataclass(frozen=True)
class Turn:
    """A message, with images (PIL) among its words."""

    role: str  # system, user or assistant
    parts: list[Any] = field(default_factory=list)  # texts and images

    @property
    def text(self) -> str:
        return "".join(part for part in self.parts if isinstance(part, str))


@dataclass(frozen=True)
class ChatFormat:
    """The form of a conversation as a prompt. `make` raises UserError where a conversation has none."""

    name: str
    takes_images: bool
    make: Callable[[Sequence[Turn]], Prompt]


def chat_format(tokenizer: Any, builder: PromptBuilder | None, encoders: Encoders) -> ChatFormat:
    """The training format of a model trained on conversations, else the tokenizer's template, else plain turns."""
    end = tokenizer.eos_token_id
    if builder is not None:
        return ChatFormat("as in training", True, partial(_as_trained, builder))
    if tokenizer.chat_template:
        return ChatFormat("the tokenizer's template", False, partial(_from_template, encoders, end))
    return ChatFormat("plain turns", False, partial(_plain_turns, encoders, end))


def completion_prompt(encoders: Encoders, given: str | list[int], end: int) -> Prompt:
    """A text, or its tokens, to continue."""
    ids = encoders.encode("text", given) if isinstance(given, str) else given
    return Prompt(as_prompt(ids, end), frozenset({end}))


def _as_trained(builder: PromptBuilder, turns: Sequence[Turn]) -> Prompt:
    """Images among the words. Placeholders of images that a client writes are only text."""
    messages = []
    for turn in turns:
        words = [part.replace(IMAGE, "") if isinstance(part, str) else IMAGE for part in turn.parts]
        messages.append(Message(turn.role, "".join(words)))  # type: ignore[arg-type]
    images = [part for turn in turns for part in turn.parts if not isinstance(part, str)]
    return Prompt(builder.ask(messages, images), frozenset({builder.end_id}), strip=True)


def _from_template(encoders: Encoders, end: int, turns: Sequence[Turn]) -> Prompt:
    """The tokenizer's own template, which transformers renders in a sandbox."""
    ids = encoders.encode("chat", [{"role": turn.role, "content": turn.text} for turn in turns])
    return Prompt(as_prompt(ids, end), frozenset({end}))


def _plain_turns(encoders: Encoders, end: int, turns: Sequence[Turn]) -> Prompt:
    """`User: ...` and `Assistant: ...` on lines of their own, for models that know no conversations."""
    lines = [f"{_NAMES[turn.role]}: {turn.text.strip()}\n" for turn in turns]
    ids = encoders.encode("text", "".join([*lines, "Assistant:"]))
    stops = tuple(f"\n{name}:" for name in _NAMES.values())
    return Prompt(as_prompt(ids, end), frozenset({end}), stops, strip=True)
