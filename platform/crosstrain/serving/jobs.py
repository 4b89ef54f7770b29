"""Completions that were asked for, and what is told of them as they come."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from crosstrain.inference.detokenizer import TextStream
from crosstrain.inference.generation import Sampling, choose, completion_rng
from crosstrain.serving.api_error import Refusal
from crosstrain.serving.chat_format import Prompt
from crosstrain.utils.types import Sample

Reason = Literal["stop", "length"]


_LEAST = -9999.0  # the smallest that is told of: JSON has no infinity


@dataclass(frozen=True)
class Score:
    """A token, the logarithm of its probability (None: nothing comes before it), and the likeliest ones in its place.

    Probabilities are the model's own, before temperature, top_k and top_p.
    """

    token: int
    logprob: float | None
    top: list[tuple[int, float]] = field(default_factory=list)


@dataclass(frozen=True)
class Piece:
    """More of a choice's text."""

    choice: int
    text: str
    scores: list[Score]


@dataclass(frozen=True)
class Finish:
    """The end of a choice's text, of so many tokens."""

    choice: int
    reason: Reason
    tokens: int


Event = Piece | Finish | Refusal  # the last of which ends everything


@dataclass(eq=False)
class Job:
    """Completions of one prompt that begin together. `deliver` is called in the thread that computes."""

    prompt: Prompt
    sampling: Sampling
    max_new_tokens: int  # 0: the prompt alone is scored
    stops: tuple[str, ...]
    logprobs: int | None  # how many of the likeliest tokens to tell of; None: no probabilities
    score_prompt: bool
    completions: dict[int, int]  # number of the completion, of which its random numbers are a function: its choice
    deliver: Callable[[Event], None]
    deadline: float  # of time.monotonic
    cancelled: bool = False  # nobody waits for it any more

    @property
    def rows(self) -> int:
        return len(self.completions)

    @property
    def sample(self) -> Sample:
        """What is computed first: the prompt, or its first token where the others are to be scored one by one."""
        return {"input_ids": self.prompt.sample["input_ids"][:1]} if self.score_prompt else self.prompt.sample

    @property
    def overdue(self) -> bool:
        return time.monotonic() > self.deadline


class Growth:
    """One completion of a job as it grows."""

    def __init__(self, job: Job, number: int, tokenizer: object) -> None:
        self.job, self.choice, self.begun = job, job.completions[number], time.monotonic()
        self._stream = TextStream(tokenizer, job.stops, job.prompt.strip)
        self._random = completion_rng(job.sampling.seed, number)
        self._given = job.prompt.ids[1:] if job.score_prompt else []  # still to be scored, first to last
        self._given.reverse()
        self._tokens = 0
        if job.score_prompt:
            self._tell("", [Score(job.prompt.ids[0], None)])

    def advance(self, logits: Tensor) -> int | None:
        """Take the next token by its logits [vocabulary], and tell of it; None: there is no more."""
        job = self.job
        if logits.isnan().any():
            raise ValueError("the model's logits are not numbers")
        if self._given:
            token = self._given.pop()
            self._tell("", [self._score(token, logits)])
            return token if self._given or job.max_new_tokens else self._finish("length")
        if not job.max_new_tokens:
            return self._finish("length")
        token = int(choose(logits[None], job.sampling, [self._random]))
        if token in job.prompt.ends:
            return self._finish("stop")
        self._tokens += 1
        piece = self._stream.push(token)
        self._tell(piece, [] if job.logprobs is None else [self._score(token, logits)])
        if self._stream.stopped:
            return self._finish("stop")
        return token if self._tokens < job.max_new_tokens else self._finish("length")

    def _finish(self, reason: Reason) -> int | None:
        self._tell(self._stream.finish(), [])
        # What was held back may have ended in a stop string that is no more than the end of it.
        self.job.deliver(Finish(self.choice, "stop" if self._stream.stopped else reason, self._tokens))
        return None

    def _tell(self, text: str, scores: list[Score]) -> None:
        if text or scores:
            self.job.deliver(Piece(self.choice, text, scores))

    def _score(self, token: int, logits: Tensor) -> Score:
        logprobs = torch.log_softmax(logits, -1).clamp(min=_LEAST)
        best = logprobs.topk(min(self.job.logprobs or 0, len(logprobs)))
        return Score(token, logprobs[token].item(), list(zip(best.indices.tolist(), best.values.tolist(), strict=True)))
