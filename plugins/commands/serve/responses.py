"""OpenAI's response documents for completions and chats, whole or streamed."""

import secrets
import time
from abc import ABC, abstractmethod
from itertools import accumulate
from typing import Any

from .jobs import Job, Piece

Document = dict[str, Any]


class ResponseBuilder(ABC):
    """Builds the response documents of one request from the pieces of its choices as they arrive."""

    prefix: str  # prefix of the ID
    kind: str  # value of `object` in a whole document
    chunk_kind: str  # value of `object` in a streamed document

    def __init__(self, model: str, jobs: list[Job], tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._prompt_tokens = sum(len(job.prompt.ids) for job in jobs if job.number == 0)  # count each prompt once
        self._head = {"id": f"{self.prefix}-{secrets.token_hex(12)}", "created": int(time.time()), "model": model}
        self._choices = [Piece(job.choice, job.echo) for job in jobs]  # text and scores of each choice so far
        self.unfinished = len(self._choices)
        self._offsets = [0] * len(self._choices)  # number of characters in the scored tokens of each choice so far

    def add(self, piece: Piece) -> None:
        choice = self._choices[piece.choice]
        choice.text += piece.text
        choice.scores += piece.scores
        choice.reason, choice.tokens = piece.reason, piece.tokens
        self.unfinished -= piece.reason is not None

    def whole(self) -> Document:
        """Return the whole response, for a non-streaming request."""
        return {
            **self._head,
            "object": self.kind,
            "choices": [self.choice(choice) for choice in self._choices],
            "usage": self.usage(),
        }

    def chunk(self, choices: list[Document], **usage: Any) -> Document:
        """Return a part of a streamed response.

        `usage` is given only if the client asked for it, and is None before the last part.
        """
        return {**self._head, "object": self.chunk_kind, "choices": choices, **usage}

    def usage(self) -> Document:
        new, prompt = sum(choice.tokens for choice in self._choices), self._prompt_tokens
        return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}

    @abstractmethod
    def openings(self) -> list[Document]:
        """Return the choices at the beginning of a stream, one per chunk."""

    @abstractmethod
    def choice(self, piece: Piece) -> Document:
        """Return the document of a finished choice."""

    def part(self, piece: Piece) -> Document:
        """Return the document of a piece in a stream."""
        return self.choice(piece)

    def _decode(self, token: int) -> str:
        return self._tokenizer.decode([token])


class CompletionResponse(ResponseBuilder):
    prefix, kind, chunk_kind = "cmpl", "text_completion", "text_completion"

    def openings(self) -> list[Document]:
        return [self.choice(echo) for echo in self._choices if echo.text]

    def choice(self, piece: Piece) -> Document:
        logprobs = self._logprobs(piece) if piece.scores else None
        return {"index": piece.choice, "text": piece.text, "logprobs": logprobs, "finish_reason": piece.reason}

    def _logprobs(self, piece: Piece) -> Document:
        words = [self._decode(s.token) for s in piece.scores]
        *offsets, self._offsets[piece.choice] = accumulate(map(len, words), initial=self._offsets[piece.choice])
        return {
            "tokens": words,
            "token_logprobs": [s.logprob for s in piece.scores],
            "top_logprobs": [
                None if s.logprob is None else {self._decode(t): p for t, p in reversed(s.top)} for s in piece.scores
            ],
            "text_offset": offsets,
        }


class ChatResponse(ResponseBuilder):
    prefix, kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def openings(self) -> list[Document]:
        return [self._choice(choice, delta={"role": "assistant", "content": ""}) for choice in self._choices]

    def part(self, piece: Piece) -> Document:
        return self._choice(piece, delta={} if piece.reason else {"content": piece.text})

    def choice(self, piece: Piece) -> Document:
        return self._choice(piece, message={"role": "assistant", "content": piece.text, "refusal": None})

    def _choice(self, piece: Piece, **content: Document) -> Document:
        scored = [
            self._entry(score.token, score.logprob) | {"top_logprobs": [self._entry(*top) for top in score.top]}
            for score in piece.scores
        ]
        logprobs = {"content": scored, "refusal": None} if scored else None
        return {"index": piece.choice, **content, "logprobs": logprobs, "finish_reason": piece.reason}

    def _entry(self, token: int, logprob: float | None) -> Document:
        word = self._decode(token)
        whole = "\N{REPLACEMENT CHARACTER}" not in word  # False: the token is only a part of a character
        return {"token": word, "logprob": logprob, "bytes": list(word.encode()) if whole else None}
