"""Text from a model under whatever runner holds it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from crosstrain.data.vision.conversations import IMAGE_ID
from crosstrain.engine.runner import Runner
from crosstrain.inference.detokenizer import TextStream
from crosstrain.modeling.base import Model
from crosstrain.utils.errors import UserError
from crosstrain.utils.rng import generator
from crosstrain.utils.types import Sample


@dataclass
class Sampling:
    """How the next token is chosen. `temperature` 0 is greedy; `top_k` 0 and `top_p` 1 keep every token."""

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


def generate(
    runner: Runner,
    tokenizer: Any,
    prompt: str | Sample,
    sampling: Sampling,
    on_text: Callable[[int, str], None] | None = None,
    end: int | None = None,
    stops: Sequence[str] = (),
) -> list[str]:
    """Completions of `prompt`, a text or a sample without labels, the same on every rank. Collective.

    `on_text(completion, piece)` is called with each piece of text as it is decided. `end`, by default the tokenizer's
    end-of-text token, ends it, and the first of the strings `stops`, which is left out. An empty prompt begins after
    the end of a text, as documents do in training. Raises UserError where the prompt leaves no room for a token, and
    where the tokenizer is not the model's.
    """
    end = tokenizer.eos_token_id if end is None else end
    count = sampling.num_completions
    sample = prompt if not isinstance(prompt, str) else text_prompt(tokenizer, prompt, end)
    room = min(sampling.max_new_tokens, room_after(runner.model, sample))
    random = [completion_rng(sampling.seed, i) for i in range(count)]
    streams = [TextStream(tokenizer, stops) for _ in range(count)]
    done = [False] * count

    def show(completion: int, piece: str) -> None:
        if piece and on_text:
            on_text(completion, piece)

    with runner.evaluating():
        growing = Growing(runner, sample, count)
        for _ in range(room):
            token = choose(growing.logits(), sampling, random)
            for i, chosen in enumerate(token.tolist()):
                done[i] = done[i] or chosen == end
                if not done[i]:
                    show(i, streams[i].push(chosen))
                    done[i] = streams[i].stopped
            if all(done):
                break
            growing.append(token)
    for i, stream in enumerate(streams):
        show(i, stream.finish())
    return [stream.text for stream in streams]


def text_prompt(tokenizer: Any, text: str, end: int) -> Sample:
    """A text as a sample; an empty one is `end`, after which documents begin."""
    ids = tokenizer(text, add_special_tokens=False)["input_ids"] or [end]
    return {"input_ids": np.array([-1 if i is None else i for i in ids], np.int64)}


def room_after(model: Model, sample: Sample) -> int:
    """How many tokens the model can add to a prompt; UserError where that is none, or ids are not the model's."""
    ids, vocabulary, limit = sample["input_ids"], model.vocab_size, model.max_length
    known = (ids >= 0) | (ids == IMAGE_ID)
    if not known.all() or (vocabulary is not None and ids.max() >= vocabulary):
        raise UserError("the tokenizer gives ids that the model does not know, so they do not belong together")
    if limit is not None and len(ids) >= limit:
        raise UserError(f"the prompt has {len(ids)} tokens and the model's limit is {limit}; shorten it")
    return sys.maxsize if limit is None else limit - len(ids)


def completion_rng(seed: int, completion: int) -> torch.Generator:
    """What the n-th completion of a prompt draws from, whatever else is computed."""
    return generator(seed, "completion", completion)


class Growing:
    """Sequences that begin with the same prompt and grow, with a key/value cache where the model keeps one."""

    def __init__(self, runner: Runner, sample: Sample, count: int = 1) -> None:
        self._runner, self.cache = runner, runner.model.new_cache()
        tensors = {key: torch.from_numpy(value) for key, value in sample.items()}
        self._new = tensors.pop("input_ids").expand(count, -1)
        self._more = {key: value.repeat(count, *[1] * (value.ndim - 1)) for key, value in tensors.items()}

    def logits(self) -> Tensor:
        """Of the next token: fp32 [count, vocabulary] on the CPU. Collective; once for every `append`."""
        batch = {"input_ids": self._new, "cache": self.cache, **self._more}
        return self._runner.evaluate(batch).float().cpu()

    def append(self, token: Tensor) -> None:
        """Go on with these tokens [count]."""
        if self.cache is None:
            self._new = torch.cat([self._new, token[:, None]], dim=1)
        else:
            self._new, self._more = token[:, None], {}


def choose(logits: Tensor, sampling: Sampling, random: list[torch.Generator]) -> Tensor:
    """Next token [batch] from fp32 logits [batch, vocabulary], each row with its own generator."""
    if sampling.temperature == 0:
        return logits.argmax(-1)
    from transformers.generation.logits_process import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    unused = torch.empty(0, dtype=torch.long)
    logits = TemperatureLogitsWarper(float(sampling.temperature))(unused, logits)
    if sampling.top_k:
        logits = TopKLogitsWarper(min(sampling.top_k, logits.shape[-1]))(unused, logits)
    if sampling.top_p < 1:
        logits = TopPLogitsWarper(sampling.top_p)(unused, logits)
    rows = zip(logits.softmax(-1), random, strict=True)
    return torch.cat([torch.multinomial(row, 1, generator=g) for row, g in rows])
