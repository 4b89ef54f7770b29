"""Jobs of the scheduler, each for one completion, and the pieces of text that they deliver."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import torch

from crosstrain import Sample
from crosstrain.inference.generation import Sequence, choose

from .api_error import ApiError
from .chat_format import Prompt

_LEAST = -9999.0  # the lowest log-probability in a response: JSON has no infinity


@dataclass(frozen=True)
class Score:
    """A token, its log-probability (None for a prompt's first token), and the likeliest tokens at its position.

    The probabilities are the model's, before temperature, top_k and top_p.
    """

    token: int
    logprob: float | None
    top: list[tuple[int, float]] = field(default_factory=list)


@dataclass
class Piece:
    """A part of a choice's text. The last piece has no text, only the finish reason and the number of tokens."""

    choice: int
    text: str = ""
    scores: list[Score] = field(default_factory=list)
    reason: Literal["stop", "length"] | None = None
    tokens: int = 0


Event = Piece | ApiError  # an error ends the request


@dataclass(eq=False, kw_only=True)
class Job(Sequence):
    """One completion of a prompt. With `score_prompt`, the job first scores the prompt's tokens one by one."""

    prompt: Prompt
    choice: int  # index among the completions of the request
    echo: str  # text before the completion
    generates: bool  # False: generate no new tokens
    logprobs: int | None  # number of likeliest tokens in the response; None: no log-probabilities
    score_prompt: bool
    deliver: Callable[[Event], None]  # may be called in any thread
    deadline: float  # value of time.monotonic() at which the job fails
    cancelled: bool = False  # the client is no longer waiting for a result

    def __post_init__(self) -> None:
        super().__post_init__()
        self._given = self.prompt.ids[:0:-1] if self.score_prompt else []  # tokens still to be scored, in reverse
        if self.score_prompt:
            self._tell("", [Score(self.prompt.ids[0], None)])

    @property
    def sample(self) -> Sample:
        """The prompt, or only its first token if the others are scored one by one."""
        return {"input_ids": self.prompt.sample["input_ids"][:1]} if self.score_prompt else self.prompt.sample

    def fail(self, error: ApiError) -> None:
        self.cancelled = True
        self.deliver(error)

    def advance(self, logits: torch.Tensor) -> int | None:
        """Choose the next token from the logits [vocabulary], deliver its text, and return the token (None: end)."""
        if logits.isnan().any():
            raise ValueError("the model's logits contain NaN")
        if self._given:
            token = self._given.pop()
            self._tell("", [self._score(token, logits)])
            if self._given or self.generates:
                return token
        if self.generates:
            token = int(choose(logits[None], self.sampling, [self.rng]))
            text = self.push(token)
            if token not in self.ends:
                self._tell(text, [] if self.logprobs is None else [self._score(token, logits)])
            if self.finish_reason is None:
                return token
        self._tell(self.text.finish(), [])
        # The text that was held back until now may contain a stop string.
        reason = "stop" if self.text.stopped else self.finish_reason or "length"
        self.deliver(Piece(self.choice, reason=reason, tokens=self.tokens))
        return None

    def _tell(self, text: str, scores: list[Score]) -> None:
        if text or scores:
            self.deliver(Piece(self.choice, text, scores))

    def _score(self, token: int, logits: torch.Tensor) -> Score:
        logprobs = torch.log_softmax(logits, -1).clamp(min=_LEAST)
        best = logprobs.topk(min(self.logprobs or 0, len(logprobs)))
        return Score(token, logprobs[token].item(), list(zip(best.indices.tolist(), best.values.tolist(), strict=True)))
