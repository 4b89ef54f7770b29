"""Text from a model under whatever runner holds it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from crosstrain.data.dataset import Batch, Sample
from crosstrain.errors import UserError
from crosstrain.rng import generator
from crosstrain.runner import Runner


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
) -> list[str]:
    """Completions of `prompt`, a text or a sample without labels, the same on every rank. Collective.

    `on_text(completion, piece)` is called with each piece of text as it is decided; `end` ends it, by default the
    tokenizer's end-of-text token. An empty prompt begins after that, as documents do in training. Raises UserError
    where the prompt leaves no room for a token, and where the tokenizer is not the model's.
    """
    end = tokenizer.eos_token_id if end is None else end
    count = sampling.num_completions
    more: Batch = {}
    if isinstance(prompt, str):
        ids = tokenizer(prompt, add_special_tokens=False)["input_ids"] or [end]
    else:
        ids = prompt["input_ids"].tolist()
        more = {
            k: torch.from_numpy(v).repeat(count, *[1] * (v.ndim - 1)) for k, v in prompt.items() if k != "input_ids"
        }
    vocabulary, limit = runner.model.vocab_size, runner.model.max_length
    if any(i is None or (vocabulary is not None and i >= vocabulary) for i in ids):
        raise UserError("the tokenizer gives ids that the model does not know, so they do not belong together")
    room = sampling.max_new_tokens if limit is None else min(sampling.max_new_tokens, limit - len(ids))
    if room < 1:
        raise UserError(f"the prompt has {len(ids)} tokens and the model's limit is {limit}; shorten it")

    random = [generator(sampling.seed, "completion", i) for i in range(count)]
    streams = [_TextStream(tokenizer) for _ in range(count)]
    done = [False] * count
    new = torch.tensor([ids] * count)
    with runner.evaluating():
        cache = runner.model.new_cache()
        for _ in range(room):
            logits = runner.evaluate({"input_ids": new, "cache": cache, **more}).float().cpu()
            token = choose(logits, sampling, random)
            for i, chosen in enumerate(token.tolist()):
                done[i] = done[i] or chosen == end
                if not done[i]:
                    piece = streams[i].push(chosen)
                    if piece and on_text:
                        on_text(i, piece)
            if all(done):
                break
            if cache is None:
                new = torch.cat([new, token[:, None]], dim=1)
            else:
                new, more = token[:, None], {}
    return [stream.text for stream in streams]


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


class _TextStream:
    """Text of a growing token sequence; holds back bytes that are not yet a whole character."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._shown = 0

    @property
    def text(self) -> str:
        return self._tokenizer.decode(self._ids)

    def push(self, token: int) -> str:
        self._ids.append(token)
        text = self.text
        if text.endswith("\N{REPLACEMENT CHARACTER}"):
            return ""
        piece, self._shown = text[self._shown :], len(text)
        return piece
