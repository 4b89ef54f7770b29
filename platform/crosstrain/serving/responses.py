"""OpenAI's response documents, of completions and of chats, whole or streamed."""

from __future__ import annotations

import secrets
import time
from abc import ABC, abstractmethod
from typing import Any

from crosstrain.serving.jobs import Finish, Piece, Score
from crosstrain.serving.service import RequestPlan

Document = dict[str, Any]


class ResponseBuilder(ABC):
    """Builds the documents that answer one request from its events, in order."""

    prefix: str  # of the id
    kind: str  # of the whole document
    chunk_kind: str  # of a streamed one

    def __init__(self, model: str, plan: RequestPlan, tokenizer: Any) -> None:
        self._plan, self._tokenizer, self.choices = plan, tokenizer, len(plan.echoes)
        self._head = {"id": f"{self.prefix}-{secrets.token_hex(12)}", "created": int(time.time()), "model": model}
        self._texts = list(plan.echoes)
        self._scores: list[list[Score]] = [[] for _ in plan.echoes]
        self._ends: dict[int, Finish] = {}

    @property
    def done(self) -> bool:
        return len(self._ends) == self.choices

    def add(self, event: Piece | Finish) -> None:
        if isinstance(event, Finish):
            self._ends[event.choice] = event
        else:
            self._texts[event.choice] += event.text
            self._scores[event.choice] += event.scores

    def whole(self) -> Document:
        """The response that is not streamed."""
        choices = [
            self.choice(i, text, scores, self._ends[i].reason)
            for i, (text, scores) in enumerate(zip(self._texts, self._scores, strict=True))
        ]
        return {**self._head, "object": self.kind, "choices": choices, "usage": self.usage()}

    def chunk(self, choices: list[Document], **usage: Any) -> Document:
        """A part of a streamed response; `usage` where the client asks for it, None before the last part."""
        return {**self._head, "object": self.chunk_kind, "choices": choices, **usage}

    def usage(self) -> Document:
        new, prompt = sum(end.tokens for end in self._ends.values()), self._plan.prompt_tokens
        return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}

    @abstractmethod
    def openings(self) -> list[Document]:
        """The choices that a stream begins with, each in a chunk of its own."""

    @abstractmethod
    def part(self, event: Piece | Finish) -> Document:
        """The choice of an event's chunk."""

    @abstractmethod
    def choice(self, index: int, text: str, scores: list[Score], reason: str | None) -> Document:
        """A finished choice."""

    def _decode(self, token: int) -> str:
        return self._tokenizer.decode([token])


class CompletionResponse(ResponseBuilder):
    prefix, kind, chunk_kind = "cmpl", "text_completion", "text_completion"

    def __init__(self, model: str, plan: RequestPlan, tokenizer: Any) -> None:
        super().__init__(model, plan, tokenizer)
        self._offsets = [0] * self.choices

    def openings(self) -> list[Document]:
        return [self.choice(i, echo, [], None) for i, echo in enumerate(self._plan.echoes) if echo]

    def part(self, event: Piece | Finish) -> Document:
        if isinstance(event, Finish):
            return self.choice(event.choice, "", [], event.reason)
        return self.choice(event.choice, event.text, event.scores, None)

    def choice(self, index: int, text: str, scores: list[Score], reason: str | None) -> Document:
        logprobs = self._logprobs(index, scores) if scores else None
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def _logprobs(self, index: int, scores: list[Score]) -> Document:
        words, offsets = [self._decode(s.token) for s in scores], []
        for word in words:
            offsets.append(self._offsets[index])
            self._offsets[index] += len(word)
        return {
            "tokens": words,
            "token_logprobs": [s.logprob for s in scores],
            "top_logprobs": [
                None if s.logprob is None else {self._decode(t): p for t, p in reversed(s.top)} for s in scores
            ],
            "text_offset": offsets,
        }


class ChatResponse(ResponseBuilder):
    prefix, kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def openings(self) -> list[Document]:
        return [self._delta(i, {"role": "assistant", "content": ""}, [], None) for i in range(self.choices)]

    def part(self, event: Piece | Finish) -> Document:
        if isinstance(event, Finish):
            return self._delta(event.choice, {}, [], event.reason)
        return self._delta(event.choice, {"content": event.text}, event.scores, None)

    def choice(self, index: int, text: str, scores: list[Score], reason: str | None) -> Document:
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": index, "message": message, "logprobs": self._logprobs(scores), "finish_reason": reason}

    def _delta(self, index: int, delta: Document, scores: list[Score], reason: str | None) -> Document:
        return {"index": index, "delta": delta, "logprobs": self._logprobs(scores), "finish_reason": reason}

    def _logprobs(self, scores: list[Score]) -> Document | None:
        content = [
            {**self._entry(s.token, s.logprob), "top_logprobs": [self._entry(t, p) for t, p in s.top]} for s in scores
        ]
        return {"content": content, "refusal": None} if content else None

    def _entry(self, token: int, logprob: float | None) -> Document:
        word = self._decode(token)
        whole = "\N{REPLACEMENT CHARACTER}" not in word  # else some of a character's bytes, which only others complete
        return {"token": word, "logprob": logprob, "bytes": list(word.encode()) if whole else None}
