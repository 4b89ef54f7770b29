"""Answers as OpenAI's interface has them, of completions and of chats, whole or in pieces."""

from __future__ import annotations

import secrets
import time
from abc import ABC, abstractmethod
from typing import Any

from crosstrain.serving.jobs import Finish, Piece, Score
from crosstrain.serving.service import Call

Document = dict[str, Any]


class Answer(ABC):
    """The documents that answer one request. Told of every event, in order."""

    kind: str  # of the whole document
    chunk_kind: str  # of a piece

    def __init__(self, model: str, call: Call, tokenizer: Any, prefix: str) -> None:
        self._call, self._tokenizer = call, tokenizer
        self._head = {"id": f"{prefix}-{secrets.token_hex(12)}", "created": int(time.time()), "model": model}
        self._texts = [""] * call.choices
        self._scores: list[list[Score]] = [[] for _ in range(call.choices)]
        self._ends: dict[int, Finish] = {}

    @property
    def done(self) -> bool:
        return len(self._ends) == self._call.choices

    def hear(self, event: Piece | Finish) -> None:
        if isinstance(event, Finish):
            self._ends[event.choice] = event
        else:
            self._texts[event.choice] += event.text
            self._scores[event.choice] += event.scores

    def whole(self) -> Document:
        """The answer that is not streamed."""
        choices = [
            self._choice(i, self._call.echoes[i] + self._texts[i], self._scores[i], self._ends[i].reason)
            for i in range(self._call.choices)
        ]
        return {**self._head, "object": self.kind, "choices": choices, "usage": self.usage()}

    def chunk(self, choices: list[Document], usage: bool) -> Document:
        """A piece of a streamed answer; `usage`: whether the last one will have figures."""
        return {**self._head, "object": self.chunk_kind, "choices": choices} | ({"usage": None} if usage else {})

    def last(self) -> Document:
        """The piece with the figures."""
        return {**self._head, "object": self.chunk_kind, "choices": [], "usage": self.usage()}

    def usage(self) -> Document:
        new = sum(end.tokens for end in self._ends.values())
        prompt = self._call.prompt_tokens
        return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}

    @abstractmethod
    def openings(self) -> list[list[Document]]:
        """What a stream begins with, chunk by chunk."""

    @abstractmethod
    def part(self, event: Piece | Finish) -> Document:
        """What a stream has of an event."""

    @abstractmethod
    def _choice(self, index: int, text: str, scores: list[Score], reason: str) -> Document:
        """A finished choice."""

    def _word(self, token: int) -> str:
        return self._tokenizer.decode([token])


class CompletionAnswer(Answer):
    kind = chunk_kind = "text_completion"

    def __init__(self, model: str, call: Call, tokenizer: Any) -> None:
        super().__init__(model, call, tokenizer, "cmpl")
        self._offsets = [0] * call.choices

    def openings(self) -> list[list[Document]]:
        return [[self._choice(i, echo, [], None)] for i, echo in enumerate(self._call.echoes) if echo]

    def part(self, event: Piece | Finish) -> Document:
        if isinstance(event, Finish):
            return self._choice(event.choice, "", [], event.reason)
        return self._choice(event.choice, event.text, event.scores, None)

    def _choice(self, index: int, text: str, scores: list[Score], reason: str | None) -> Document:
        logprobs = self._logprobs(index, scores) if scores else None
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def _logprobs(self, index: int, scores: list[Score]) -> Document:
        words, offsets = [self._word(s.token) for s in scores], []
        for word in words:
            offsets.append(self._offsets[index])
            self._offsets[index] += len(word)
        return {
            "tokens": words,
            "token_logprobs": [s.logprob for s in scores],
            "top_logprobs": [
                None if s.logprob is None else {self._word(t): p for t, p in reversed(s.top)} for s in scores
            ],
            "text_offset": offsets,
        }


class ChatAnswer(Answer):
    kind, chunk_kind = "chat.completion", "chat.completion.chunk"

    def __init__(self, model: str, call: Call, tokenizer: Any) -> None:
        super().__init__(model, call, tokenizer, "chatcmpl")

    def openings(self) -> list[list[Document]]:
        start = {"role": "assistant", "content": ""}
        return [[self._delta(i, start)] for i in range(self._call.choices)]

    def part(self, event: Piece | Finish) -> Document:
        if isinstance(event, Finish):
            return self._delta(event.choice, {}, reason=event.reason)
        return self._delta(event.choice, {"content": event.text}, self._logprobs(event.scores))

    def _delta(
        self, index: int, delta: Document, logprobs: Document | None = None, reason: str | None = None
    ) -> Document:
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}

    def _choice(self, index: int, text: str, scores: list[Score], reason: str) -> Document:
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": index, "message": message, "logprobs": self._logprobs(scores), "finish_reason": reason}

    def _logprobs(self, scores: list[Score]) -> Document | None:
        if not scores:
            return None
        content = [
            {**self._entry(s.token, s.logprob), "top_logprobs": [self._entry(t, p) for t, p in s.top]} for s in scores
        ]
        return {"content": content, "refusal": None}

    def _entry(self, token: int, logprob: float | None) -> Document:
        word = self._word(token)
        whole = "\N{REPLACEMENT CHARACTER}" not in word  # else some of a character's bytes, which only others complete
        return {"token": word, "logprob": logprob, "bytes": list(word.encode()) if whole else None}
