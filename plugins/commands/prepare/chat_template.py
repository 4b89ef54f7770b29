"""Render conversations with the tokenizer's chat template, and find the tokens that the assistant writes."""

import copy
import itertools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache
from pathlib import Path
from typing import Any, Literal

from tokenizers import Tokenizer

from crosstrain import (
    IGNORE_INDEX,
    DataError,
    SampleError,
    TextTokenizer,
    check_source,
    first_line,
    os_errors_as,
    read_regular,
)
from crosstrain.data.tokenizer import cached_folder, load_cached, stored_tokenizer
from crosstrain.utils import paths

Message = Mapping[str, Any]  # role, content (text, or null with tool_calls), and other keys for the template
TrainOn = Literal["assistant", "last", "all"]

_MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")
# Texts that templates write before a reply without reasoning. The prompt may already contain the beginning of one.
_NO_THOUGHT = ("", "<think></think>", "</think>")
_OPENING = 64  # maximum number of characters at the start of an answer that the prompt may already contain
_MAX_TEMPLATE = 1 << 27  # maximum size of a template file in bytes
_THOUGHTS = ("reasoning_content", "reasoning", "thinking")  # keys of a turn's reasoning; a template reads one of them


class ChatError(SampleError):
    """A conversation that cannot be used."""


def refuse_if(is_wrong: object, reason: str) -> None:
    """Raise ChatError with the reason if `is_wrong`."""
    if is_wrong:
        raise ChatError(reason)


@dataclass(frozen=True)
class EncodedChat:
    """A rendered conversation: token IDs, a target flag for each token, and the parts that the template leaves out."""

    ids: list[int]
    is_target: list[bool]
    unwritten: frozenset[str] = frozenset()

    @property
    def labels(self) -> list[int]:
        """The label at each position except the last: the next token if it is a target, else IGNORE_INDEX."""
        return [i if learned else IGNORE_INDEX for i, learned in zip(self.ids, self.is_target, strict=True)][1:]


class ChatTemplate:
    """A tokenizer with its chat template.

    The targets are the assistant's text in its turns, including the token that ends the turn. A template can mark this
    text with `{% generation %}`. In a template without marks, the targets are the text after the generation prompt, so
    this prompt must be a prefix of the rendered conversation.
    """

    def __init__(self, folder: Path) -> None:
        """folder: the tokenizer's folder. Raises DataError if the tokenizer has no chat template."""
        from transformers import PreTrainedTokenizerFast

        arguments = stored_tokenizer(folder)
        self.tokenizer = PreTrainedTokenizerFast(**arguments)
        if not self.tokenizer.chat_template:
            raise DataError("the tokenizer has no chat template: set chat_template")
        self.backend: Tokenizer = Tokenizer.from_str(arguments["tokenizer_object"].to_str())
        self.backend.no_truncation()
        self.backend.no_padding()
        added = self.backend.get_added_tokens_decoder().values()
        self._special = {token.content for token in added if token.special} | set(self.tokenizer.all_special_tokens)
        texts = {text for token in self._special for text in (token, repr(token)[1:-1])}
        self._special_token = re.compile("|".join(sorted(map(re.escape, texts), key=len, reverse=True)) or r"(?!)")

    # ---- rendering

    def render(self, messages: Sequence[Message], tools: list[Any] | None = None, *, answering: bool = False) -> str:
        """Render a conversation; `answering`: append the generation prompt. Raises ChatError if the template fails."""
        return self._render(messages, tools, answering, False)[0]

    def _render(
        self, messages: Sequence[Message], tools: list[Any] | None, answering: bool, marked: bool
    ) -> tuple[str, list[tuple[int, int]]]:
        from transformers.utils.chat_template_utils import render_jinja_template

        render: Callable[..., Any] = render_jinja_template
        objects = [arguments for _, arguments in _calls(messages) if arguments and isinstance(arguments, Mapping)]
        words = "".join(map(words_of, messages))
        try:
            texts, marks = render(
                conversations=[list(messages)],
                tools=tools,
                add_generation_prompt=answering,
                chat_template=self.tokenizer.get_chat_template(None, tools),
                return_assistant_tokens_mask=marked,
                **self.tokenizer.special_tokens_map,
            )
            if not any(str(arguments) in texts[0] and str(arguments) not in words for arguments in objects):
                return texts[0], marks[0] if marked else []
        except MemoryError:  # raised by the memory limit of the process
            raise
        except Exception as error:  # templates may raise anything
            if not objects:
                raise ChatError(f"the chat template rejects the conversation ({first_line(error)})") from None
        # The template expects arguments as JSON text: given an object, it fails or writes Python syntax.
        return self._render(_with_json(messages), tools, answering, marked)

    # ---- targets

    def encode(
        self, messages: Sequence[Message], tools: list[Any] | None, train_on: TrainOn = "assistant"
    ) -> EncodedChat:
        """Return the tokens, and the targets selected by `train_on`.

        The targets are the assistant's turns ("assistant"), only its last turn ("last"), or all tokens except the first
        ("all"). Turns with weight 0 are not targets. Raises ChatError if a conversation has no target, or if the
        template does not separate targets from other text.
        """
        text, spans, weight = self.located(messages, tools, train_on)
        ids, found = self.tokens(text, spans)
        is_target = found if weight else [False] + [not is_found for is_found in found[1:]]
        return EncodedChat(ids, is_target, _unwritten(text, messages, tools))

    def located(
        self, messages: Sequence[Message], tools: list[Any] | None, train_on: TrainOn = "assistant"
    ) -> tuple[str, list[tuple[int, int]], int]:
        """Return the rendered text, spans of turns in it, and 1 if the spans are the targets, 0 if all other text is.

        Raises ChatError as `encode` does.
        """
        self.check(messages, tools)
        own = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
        # weight of the turns to look for: 1 (targets), or 0 (excluded turns) if train_on is "all"
        weight = int(train_on != "all")
        others = [n + 1 for n, m in enumerate(messages) if n not in own and m.get("weight") == weight]
        refuse_if(
            others, f"turns {others} have weight {weight}, which train_on: {train_on} allows only for the assistant"
        )
        wanted = [n for n in (own[-1:] if train_on == "last" else own) if messages[n].get("weight", 1) == weight]
        refuse_if(
            weight and not wanted,
            f"it has no assistant turn{' with a weight above 0' if own else ''}, so there is nothing to train on",
        )
        marked = bool(wanted and _MARKED.search(self.tokenizer.get_chat_template(None, tools)))
        text, marks = self._render(messages, tools, False, marked)
        refuse_if(
            marked and len(marks) != len(own),
            f"the template marks {len(marks)} spans as generation, but there are {len(own)} assistant turns",
        )
        spans = []
        for number in wanted:
            span = marks[own.index(number)] if marked else self._after_prompt(text, messages, number, tools)
            spans.append(self._with_end(text, span, messages[number], number, strict=not marked))
        return text, spans, weight

    @cached_property
    def _advice(self) -> str:
        names = [name for name, text in template_library().items() if not lacking(self.backend, text)]
        return f"use a template with generation marks, such as chat_template: {' or '.join(names) or 'a file'}"

    def check(self, messages: Sequence[Message], tools: list[Any] | None) -> None:
        """Raise ChatError if a text contains a special token."""
        parts = {"the tools": tools} | {f"turn {number}": message for number, message in enumerate(messages, 1)}
        for name, part in parts.items():
            if found := self._special_token.search(str(part)):
                raise ChatError(f"the text of {name} contains the special token {found.group()}")

    def _after_prompt(
        self, text: str, messages: Sequence[Message], number: int, tools: list[Any] | None
    ) -> tuple[int, int]:
        """Return the span of a turn in `text`: from the end of its prompt to the end of the turn.

        Raises ChatError unless the prompt is a prefix of the conversation up to and including this turn, and this part
        of the conversation is a prefix of `text`.
        """
        prompt = self.render(messages[:number], tools, answering=True)
        turn = text if number + 1 == len(messages) else self.render(messages[: number + 1], tools)
        refuse_if(
            not turn.startswith(prompt),
            f"the prompt for turn {number + 1} is not a prefix of the conversation up to that turn, so the "
            f"assistant's text cannot be located; {self._advice}",
        )
        refuse_if(
            not text.startswith(turn),
            f"the template renders turn {number + 1} differently when other turns follow; use train_on: last, or "
            f"{self._advice}",
        )
        return len(prompt), len(turn)

    def _with_end(
        self, text: str, span: tuple[int, int], message: Message, number: int, strict: bool
    ) -> tuple[int, int]:
        """Extend a span to the token that ends the turn.

        Raises ChatError if there is no such token, or if the template changes the text of the turn.
        """
        start, stop = span
        turn = text[start:stop]
        found = list(self._special_token.finditer(turn))
        if found and not turn[found[-1].end() :].strip():
            stop = start + found[-1].end()
            words = turn[: found[-1].start()]
        elif following := self._special_token.match(text, stop):
            stop, words = following.end(), turn
        else:
            raise ChatError(
                f"the template does not end turn {number + 1} with a special token, so a model would not learn to stop"
            )
        content, written = _dense(words_of(message)), _dense(words)
        if content not in written:  # the prompt may contain the answer's beginning, such as <think>
            prompt = _dense(text[max(0, start - _OPENING) : start])
            lengths = (n for n in range(min(len(content), _OPENING), 0, -1) if prompt.endswith(content[:n]))
            content = content[next(lengths, 0) :]
        refuse_if(content not in written, f"the template changes the text of turn {number + 1}; {self._advice}")
        names = [name for name, _ in _calls([message])]
        refuse_if(
            not all(_dense(part) in written for part in (*names, *map(message.get, _THOUGHTS))),
            f"the template leaves out thoughts or tool calls of turn {number + 1}; {self._advice}",
        )
        before = written[: len(written) - len(content)] if written.endswith(content) else None
        beside = before is None or (before not in _NO_THOUGHT and not any(map(message.get, _THOUGHTS)))
        refuse_if(
            strict and beside and not names,
            f"the template adds text to turn {number + 1} ({written[:40]!r}) that its generation prompt does not "
            f"contain; {self._advice}",
        )
        return start, stop

    # ---- tokens

    def tokens(self, text: str, spans: list[tuple[int, int]]) -> tuple[list[int], list[bool]]:
        """Return the token IDs, and whether each token is in a span.

        No token crosses the border of a span, because at inference no token crosses the end of the prompt.
        """
        bounds = [0, *itertools.chain(*spans), len(text)]
        # One by one: a batch would start threads, which takes longer than these short texts.
        parts = [
            self.backend.encode(text[start:stop], add_special_tokens=False).ids
            for start, stop in itertools.pairwise(bounds)
        ]
        ids = [i for part in parts for i in part]
        if self.backend.decode(ids, skip_special_tokens=False) == text:
            return ids, [bool(n % 2) for n, part in enumerate(parts) for _ in part]
        # This tokenizer prepends a space to each text: encode the whole text; token boundaries must match the spans.
        whole = self.backend.encode(text, add_special_tokens=False)
        starts, stops = {a for a, _ in whole.offsets}, {b for _, b in whole.offsets}
        refuse_if(
            not all(start in starts and stop in stops for start, stop in spans),
            "a token crosses a border of the assistant's text",
        )
        return whole.ids, [any(start <= a and b <= stop for start, stop in spans) for a, b in whole.offsets]


def words_of(message: Message) -> str:
    """Return the text of a turn; its content is a text, or parts that may also be images."""
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


def _calls(messages: Sequence[Message]) -> list[tuple[str, Any]]:
    """Return (name, arguments) of all tool calls."""
    return [
        (call["function"]["name"], call["function"].get("arguments"))
        for message in messages
        for call in message.get("tool_calls") or ()
    ]


def _with_json(messages: Sequence[Message]) -> list[Message]:
    """Return a copy of the messages with the arguments of tool calls as JSON text."""
    copied: list[Any] = copy.deepcopy(list(messages))
    for message in copied:
        for call in message.get("tool_calls") or ():
            call["function"]["arguments"] = json.dumps(call["function"].get("arguments"), ensure_ascii=False)
    return copied


def _unwritten(text: str, messages: Sequence[Message], tools: list[Any] | None) -> frozenset[str]:
    """Return the names of the parts of a conversation that the template leaves out, except the assistant's turns."""
    written = _dense(text)
    found = {
        f"messages.content of {message['role']} turns"
        for message in messages
        if message["role"] != "assistant" and not _shows(text, written, words_of(message))
    }
    functions = [tool.get("function", {}) for tool in tools or ()]  # a call contains the name, too
    lacks_tools = not all(_shows(text, written, f.get("description") or f.get("name", "")) for f in functions)
    return frozenset(found | ({"tools"} if lacks_tools else set()))


def _shows(text: str, written: str, words: str) -> bool:
    """Return True if `text` contains `words`, unchanged or JSON-escaped. `written` is the text without white space."""
    return _dense(words) in written or json.dumps(words)[1:-1] in text


def _dense(text: Any) -> str:
    """Remove white space from a text, because templates add and remove white space."""
    return "".join(text.split()) if isinstance(text, str) else ""


# ---- templates that are not the tokenizer's own


@cache
def template_library() -> dict[str, str]:
    """Return name -> Jinja text of the templates in configs/chat_templates, which mark the assistant's text.

    The first line of each template lists the tokens that the tokenizer must have.
    """
    return {
        file.stem: file.read_text(encoding="utf-8")
        for file in sorted((paths.home() / "configs" / "chat_templates").glob("*.jinja"))
    }


def lacking(tokenizer: Tokenizer, template: str) -> list[str]:
    """Return the tokens that a library template needs and a tokenizer does not have."""
    first = template.partition("\n")[0].removeprefix("{#- tokens:").removesuffix("-#}")
    return [token for token in first.split() if tokenizer.token_to_id(token) is None]


@lru_cache(maxsize=8)
def load_with_template(spec: str, chat_template: str | None) -> tuple[TextTokenizer, Path]:
    """Load a tokenizer and return it with its `cached_folder`.

    chat_template: a name in configs/chat_templates, a Jinja text, or the path of a Jinja file; None: use the
    tokenizer's own template.
    """
    tokenizer, folder = load_cached(spec)
    if chat_template is None:
        return tokenizer, folder
    text, library = chat_template, template_library()
    if chat_template in library:
        text = library[chat_template]
        if missing := lacking(tokenizer.backend, text):
            raise DataError(f"chat_template: {chat_template} needs {', '.join(missing)}, which {spec} lacks")
    if "{" not in text:
        check_source(f"the chat template {text}")
        with os_errors_as(DataError, f"chat_template: {text} is neither Jinja, a file nor one of {', '.join(library)}"):
            text = read_regular(Path(text).expanduser(), _MAX_TEMPLATE).decode("utf-8", "replace")
    tokenizer = replace(tokenizer, chat_template=text)
    return tokenizer, cached_folder(tokenizer, spec)
