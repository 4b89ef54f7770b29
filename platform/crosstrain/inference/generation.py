"""Text generation under any runner."""

import sys
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch

from crosstrain.distributed.group import Group
from crosstrain.engine.runner import Runner
from crosstrain.inference.decoder import DecodeState
from crosstrain.inference.detokenizer import TextStream
from crosstrain.modeling.base import Model
from crosstrain.utils.errors import UserError
from crosstrain.utils.rng import generator
from crosstrain.utils.types import Sample

UNKNOWN = -1  # stands for a token without an ID; other negative IDs are placeholders
OnText = Callable[[int, str], None]  # called with (index of the completion, new piece of its text)


@dataclass
class Sampling:
    """Sampling settings. `temperature` 0 is greedy decoding; `top_k` 0 and `top_p` 1 keep every token."""

    max_new_tokens: int = 64
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    num_completions: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        checks = [
            (self.max_new_tokens >= 1, "max-new-tokens must be at least 1"),
            (self.temperature >= 0, "temperature must not be negative"),
            (self.top_k >= 0, "top-k must not be negative"),
            (0 < self.top_p <= 1, "top-p must be above 0 and at most 1"),
            (self.num_completions >= 1, "num-completions must be at least 1"),
        ]
        for fine, complaint in checks:
            if not fine:
                raise UserError(complaint)


@dataclass(eq=False)
class Sequence:
    """A growing completion: its random number generator, its text so far and its finish reason."""

    sampling: Sampling
    number: int  # index of the completion; its random numbers depend only on the seed and this index
    ends: Collection[int]  # end tokens
    text: TextStream
    tokens: int = 0
    finish_reason: Literal["stop", "length"] | None = None

    def __post_init__(self) -> None:
        self.rng = generator(self.sampling.seed, "completion", self.number)

    def push(self, token: int) -> str:
        """Add a token, and return the text that it completes."""
        if token in self.ends:
            self.finish_reason = "stop"
            return ""
        self.tokens += 1
        piece = self.text.push(token)
        if self.text.stopped:
            self.finish_reason = "stop"
        elif self.tokens == self.sampling.max_new_tokens:
            self.finish_reason = "length"
        return piece


def decode(
    runner: Runner,
    prompts: list[Sample],
    sequences: list[Sequence],
    on_text: OnText | None = None,
    group: Group | None = None,
) -> list[str]:
    """Decode one sequence for each prompt until all are finished, and return their texts. Collective.

    `group`: ranks with different prompts; all ranks continue until the last sequence of the group is finished.
    """
    state, sampling = DecodeState(runner, prompts), sequences[0].sampling
    while True:
        tokens = choose(state.logits(), sampling, [sequence.rng for sequence in sequences])
        for number, (sequence, token) in enumerate(zip(sequences, tokens.tolist(), strict=True)):
            if sequence.finish_reason is None and (piece := sequence.push(token)) and on_text:
                on_text(number, piece)
        going = any(sequence.finish_reason is None for sequence in sequences)
        if not (going if group is None else group.all_reduce_sum(going, tag="unfinished sequences")[0]):
            break
        state.append(tokens)
    for number, sequence in enumerate(sequences):
        if (rest := sequence.text.finish()) and on_text:
            on_text(number, rest)
    return [sequence.text.text for sequence in sequences]


def generate(
    runner: Runner,
    tokenizer: Any,
    prompt: Sample,
    sampling: Sampling,
    on_text: OnText | None = None,
    ends: Collection[int] | None = None,
    stops: Iterable[str] = (),
) -> list[str]:
    """Complete `prompt`, a sample without labels; results are the same on every rank. Collective.

    `on_text(index, piece)` is called for each new piece of a completion's text. A completion ends at an end token, or
    before the first occurrence of a string in `stops`. `ends` defaults to the tokenizer's end-of-text token. Raises
    UserError if the prompt leaves no room for a token or if the tokenizer does not match the model.
    """
    ends = [tokenizer.eos_token_id] if ends is None else ends
    sampling = replace(sampling, max_new_tokens=min(sampling.max_new_tokens, room_after(runner.model, prompt)))
    count = sampling.num_completions
    sequences = [Sequence(sampling, i, ends, TextStream(tokenizer, stops)) for i in range(count)]
    with runner.evaluating():
        return decode(runner, [prompt] * count, sequences, on_text)


def as_prompt(ids: list[int], end: int) -> Sample:
    """Make a sample from token IDs; an empty prompt becomes `end`, the token before each document in training."""
    return {"input_ids": np.array([UNKNOWN if i is None else i for i in ids] or [end], np.int64)}


def room_after(model: Model, sample: Sample, least: int = 1) -> int:
    """Return the number of tokens that the model can add to a prompt.

    Raises UserError if this number is below `least`, and for token IDs outside the model's vocabulary.
    """
    ids, vocabulary, limit = sample["input_ids"], model.vocab_size, model.max_length
    if (ids == UNKNOWN).any() or (vocabulary is not None and ids.max() >= vocabulary):
        raise UserError("the tokenizer produces IDs outside the model's vocabulary; use the model's own tokenizer")
    if limit is not None and len(ids) + least > limit:
        raise UserError(f"the prompt has {len(ids)} tokens, but the model's limit is {limit}; shorten the prompt")
    return sys.maxsize if limit is None else limit - len(ids)


def choose(logits: torch.Tensor, sampling: Sampling, random: list[torch.Generator]) -> torch.Tensor:
    """Sample next tokens [batch], on the CPU, from fp32 logits [batch, vocabulary]; `random`: one generator per row."""
    if sampling.temperature == 0:
        return logits.argmax(-1).cpu()
    from transformers.generation.logits_process import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    unused = torch.empty(0, dtype=torch.long)
    logits = TemperatureLogitsWarper(float(sampling.temperature))(unused, logits.cpu())
    if sampling.top_k:
        logits = TopKLogitsWarper(min(sampling.top_k, logits.shape[-1]))(unused, logits)
    if sampling.top_p < 1:
        logits = TopPLogitsWarper(sampling.top_p)(unused, logits)
    rows = zip(logits.softmax(-1), random, strict=True)
    return torch.cat([torch.multinomial(row, 1, generator=g) for row, g in rows])
