"""Render conversations by the tokenizer's chat template, and find the tokens that the assistant writes."""

import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tokenizers import Tokenizer

from crosstrain.data.tokenizer import stored_tokenizer
from crosstrain.utils.errors import DataError, first_line

Message = Mapping[str, Any]  # role, content (text, or null beside tool_calls), and what else the template reads
TrainOn = Literal["assistant", "last", "all"]

_MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")
_NO_THOUGHT = "<think></think>"  # which templates write before words without a thought, where white space is left out
_REASONING = ("reasoning_content", "reasoning", "thinking")


class ChatError(Exception):
    """A conversation that cannot be used, with the reason."""


@dataclass(frozen=True)
class EncodedChat:
    """A rendered conversation: its tokens, and a flag for each that is a target."""

    ids: list[int]
    is_target: list[bool]


@dataclass(frozen=True)
class _Span:
    """Characters [start, stop) of a rendered conversation that one turn of the assistant writes."""

    start: int
    stop: int


class ChatTemplate:
    """A tokenizer with its chat template.

    Targets are what the assistant writes in its turns, up to and with the token that ends the turn. Templates mark it
    by `{% generation %}`. In others it is what follows the prompt that the same template gives for an answer, which
    therefore has to be a prefix of the rendered conversation.
    """

    def __init__(self, folder: Path, template: str | None = None) -> None:
        """folder: of a tokenizer. template: Jinja text to use in place of the tokenizer's own.

        Raises DataError where there is no template.
        """
        from transformers import PreTrainedTokenizerFast

        arguments = stored_tokenizer(folder)
        self.tokenizer = PreTrainedTokenizerFast(**arguments)
        if template is not None:
            self.tokenizer.chat_template = template
        if not self.tokenizer.chat_template:
            raise DataError("the tokenizer has no chat template: give one, as chat_template")
        self.backend: Tokenizer = Tokenizer.from_str(arguments["tokenizer_object"].to_str())
        self.backend.no_truncation()
        self.backend.no_padding()
        added = self.backend.get_added_tokens_decoder().values()
        self._special = {token.content for token in added if token.special} | set(self.tokenizer.all_special_tokens)
        alternatives = sorted(map(re.escape, self._special), key=len, reverse=True)
        self._special_token = re.compile("|".join(alternatives) or r"(?!)")

    # ---- rendering

    def render(self, messages: Sequence[Message], tools: list[Any] | None = None, *, answering: bool = False) -> str:
        """Render a conversation; with `answering`, up to where the assistant's next words begin. ChatError if not."""
        return self._render(messages, tools, answering, False)[0]

    def _render(
        self, messages: Sequence[Message], tools: list[Any] | None, answering: bool, marked: bool
    ) -> tuple[str, list[tuple[int, int]]]:
        from transformers.utils.chat_template_utils import render_jinja_template

        render: Callable[..., Any] = render_jinja_template
        try:
            texts, marks = render(
                conversations=[list(messages)], tools=tools, add_generation_prompt=answering,
                chat_template=self.tokenizer.get_chat_template(None, tools), return_assistant_tokens_mask=marked,
                **self.tokenizer.special_tokens_map,
            )  # fmt: skip
        except MemoryError:  # of a process with limits
            raise
        except Exception as error:  # templates raise whatever they like
            raise ChatError(f"the chat template refuses it ({first_line(error)})") from None
        return texts[0], marks[0] if marked else []

    # ---- targets

    def encode(
        self, messages: Sequence[Message], tools: list[Any] | None, train_on: TrainOn = "assistant"
    ) -> EncodedChat:
        """Return tokens and targets: of the assistant's turns, of the last of them alone, or all tokens but the first.

        Raises ChatError for a conversation without such turns, and where targets cannot be told from the rest.
        """
        self._check(messages, tools)
        if train_on == "all":
            ids = self._encode([self.render(messages, tools)])[0]
            return EncodedChat(ids, [False] + [True] * (len(ids) - 1))
        own = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
        if not own:
            raise ChatError("no turn is the assistant's, so nothing is to be learned")
        wanted = own[-1:] if train_on == "last" else own
        marked = bool(_MARKED.search(self.tokenizer.get_chat_template(None, tools)))
        text, marks = self._render(messages, tools, False, marked)
        if marked:
            if len(marks) != len(own):
                raise ChatError(f"the template marks {len(marks)} spans by generation, and {len(own)} turns are own")
            spans = [_Span(*mark) for mark in (marks[-1:] if train_on == "last" else marks)]
        else:
            spans = [self._after_prompt(text, messages, number, tools) for number in wanted]
        spans = [
            self._with_end(text, span, messages[number], number, strict=not marked)
            for span, number in zip(spans, wanted, strict=True)
        ]
        return self._tokens(text, spans)

    def _check(self, messages: Sequence[Message], tools: list[Any] | None) -> None:
        parts = {"the tools": tools} | {f"turn {number}": message for number, message in enumerate(messages, 1)}
        for name, part in parts.items():
            for text in _strings(part):
                if found := self._special_token.search(text):
                    raise ChatError(f"the words of {name} contain the special token {found.group()}")

    def _after_prompt(self, text: str, messages: Sequence[Message], number: int, tools: list[Any] | None) -> _Span:
        """Find a turn as what is added to the prompt for it. Raises ChatError unless prompt and turn are prefixes."""
        prompt = self.render(messages[:number], tools, answering=True)
        turn = self.render(messages[: number + 1], tools)
        if not turn.startswith(prompt):
            raise ChatError(
                f"the prompt for turn {number + 1} is no prefix of the conversation up to it, so the template does not "
                f"show what the assistant writes; use one with generation marks"
            )
        if not text.startswith(turn):
            raise ChatError(
                f"the template renders turn {number + 1} in another way when other turns follow; use train_on: last"
            )
        return _Span(len(prompt), len(turn))

    def _with_end(self, text: str, span: _Span, message: Message, number: int, strict: bool) -> _Span:
        """Let a span end with the token that ends the turn. Raises ChatError where there is none, or words differ."""
        turn = text[span.start : span.stop]
        found = list(self._special_token.finditer(turn))
        if found and not turn[found[-1].end() :].strip():
            stop = span.start + found[-1].end()
            words = turn[: found[-1].start()]
        elif following := self._special_token.match(text, span.stop):
            stop, words = following.end(), turn
        else:
            raise ChatError(f"the template ends turn {number + 1} by no special token, so no model would learn to stop")
        content, written = _dense(message.get("content")), _dense(words)
        if content not in written:
            raise ChatError(f"the template changes the words of turn {number + 1}")
        before = written[: len(written) - len(content)] if written.endswith(content) else None
        beside = before is None or (before not in ("", _NO_THOUGHT) and not any(map(message.get, _REASONING)))
        if strict and beside and not message.get("tool_calls"):
            raise ChatError(
                f"the template writes more than the words of turn {number + 1} ({written[:40]!r}), which the prompt "
                f"for an answer does not have; use a template with generation marks"
            )
        return _Span(span.start, stop)

    # ---- tokens

    def _tokens(self, text: str, spans: list[_Span]) -> EncodedChat:
        """Tokenize; a token begins where a span begins, as at inference, where the prompt ends there."""
        bounds = [0, *(place for span in spans for place in (span.start, span.stop)), len(text)]
        parts = self._encode([text[a:b] for a, b in itertools.pairwise(bounds)])
        ids = [i for part in parts for i in part]
        if self.backend.decode(ids, skip_special_tokens=False) == text:
            return EncodedChat(ids, [bool(n % 2) for n, part in enumerate(parts) for _ in part])
        # A tokenizer that begins each text with a space: the whole, if its tokens end where the spans do.
        whole = self.backend.encode(text, add_special_tokens=False)
        starts, stops = {a for a, _ in whole.offsets}, {b for _, b in whole.offsets}
        if not all(span.start in starts and span.stop in stops for span in spans):
            raise ChatError("a token crosses the beginning of the assistant's words")
        learned = [any(span.start <= a and b <= span.stop for span in spans) for a, b in whole.offsets]
        return EncodedChat(whole.ids, learned)

    def _encode(self, texts: list[str]) -> list[list[int]]:
        return [encoding.ids for encoding in self.backend.encode_batch(texts, add_special_tokens=False)]


def _strings(value: Any) -> Iterator[str]:
    """Yield all strings in a JSON value, keys as well."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, (Mapping, list, tuple)):
        for inner in itertools.chain(value, value.values()) if isinstance(value, Mapping) else value:
            yield from _strings(inner)


def _dense(text: Any) -> str:
    """Text without white space, which templates strip and add."""
    return "".join(text.split()) if isinstance(text, str) else ""
