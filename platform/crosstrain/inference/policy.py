"""The model as a policy, for objectives that generate samples during training."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from crosstrain.data.dataset import Dataset
from crosstrain.engine.runner import Runner
from crosstrain.inference.decoder import DecodeState
from crosstrain.inference.generation import as_prompt
from crosstrain.modeling.forward_mode import ForwardMode
from crosstrain.modeling.objective import Completion
from crosstrain.utils.errors import ConfigError
from crosstrain.utils.rng import generator
from crosstrain.utils.types import Batch, Sample


class Policy:
    """The model with its current weights, under any runner. All methods are collective.

    dataset: dataset of the prompts, with the tokenizer and the tokens that end an answer.
    """

    def __init__(self, runner: Runner, dataset: Dataset) -> None:
        self._runner, self.dataset = runner, dataset
        # A forward may contain collectives, so these ranks decode together until all their completions have ended.
        self._ranks = runner.dp if runner.team is runner.world else runner.team

    def generate(
        self, prompts: Sequence[Sample], keys: Sequence[tuple[int, ...]], max_new_tokens: int,
        temperature: float = 1.0, ends: Sequence[int] = (),
    ) -> list[Completion]:  # fmt: skip
        """Generate a completion of each prompt, a sample without labels. Temperature 0 chooses the likeliest tokens.

        A completion stops after a token in `ends`, or after `max_new_tokens` tokens. Its random numbers depend only on
        the run's seed and its key, such as (sample number, index of the completion). A rank may have no prompts. Raises
        ConfigError if a prompt leaves no room for `max_new_tokens` tokens.
        """
        runner = self._runner
        wanted = len(prompts)
        if not prompts:  # the forward may be collective
            prompts, keys = [as_prompt([], 0)], [()]
        longest, limit = max(len(prompt["input_ids"]) for prompt in prompts), runner.model.max_length
        if limit is not None and longest + max_new_tokens > limit:
            raise ConfigError(
                f"run.objective: a prompt has {longest} tokens and the model takes at most {limit}, so there is no "
                f"room for {max_new_tokens} more; lower max_new_tokens"
            )
        random = [generator(runner.run.seed, "policy", *key) for key in keys]
        completions = [Completion([], []) for _ in keys]
        with runner.timers("generate"), runner.evaluating():
            state = DecodeState(runner, prompts)
            for _ in range(max_new_tokens):
                tokens, chances = _draw(state.logits().cpu(), temperature, random)
                for completion, token, chance in zip(completions, tokens.tolist(), chances.tolist(), strict=True):
                    if not completion.tokens or completion.tokens[-1] not in ends:
                        completion.tokens.append(token)
                        completion.log_probabilities.append(chance)
                going = any(completion.tokens[-1] not in ends for completion in completions)
                if not self._ranks.all_reduce_sum(going)[0]:
                    break
                state.append(tokens)
        return completions[:wanted]

    def outputs(self, batch: Batch, mode: ForwardMode) -> Tensor:
        """Compute what `mode` asks for, without gradients, on the CPU."""
        with self._runner.evaluating():
            return self._runner.evaluate(batch, mode).float().cpu()

    def all_gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks with different samples, in the order of the ranks."""
        return self._ranks.all_gather(value)

    def log_probabilities(self, batch: Batch) -> Tensor:
        """Compute log-probabilities [rows, length] of the `labels`, fp32 on the CPU; 0 at positions without a label.

        If the objective has `token_losses`, these are the negated token losses.
        """
        of_tokens = self._runner.objective.token_losses
        losses = None if of_tokens is None else partial(of_tokens, batch=batch)
        return self.outputs(batch, ForwardMode(reduce=torch.neg, token_losses=losses))

    def keep(self, kind: str) -> None:
        """Replace the copy of the weights called `kind`, one of the objective's `keeps`, with the current weights."""
        self._runner.held.keep(kind)

    @contextmanager
    def kept(self, kind: str) -> Iterator[None]:
        """Context manager in which the policy has the weights called `kind`."""
        self._runner.held.swap(kind)
        try:
            yield
        finally:
            self._runner.held.swap(kind)


def _draw(logits: Tensor, temperature: float, random: list[torch.Generator]) -> tuple[Tensor, Tensor]:
    """Draw a token [rows] for each row of fp32 logits [rows, V]; return the tokens and their log-probabilities.

    Each row takes one number of its generator and inverts the cumulative distribution: much faster than
    `torch.multinomial` for each row.
    """
    chances = (logits if temperature in (0, 1) else logits / temperature).log_softmax(-1)
    if temperature:
        numbers = torch.cat([torch.rand(1, 1, generator=each, dtype=torch.float64) for each in random])
        below = chances.exp().cumsum(-1, dtype=torch.float64)
        tokens = torch.searchsorted(below, numbers * below[:, -1:])
    else:
        tokens = logits.argmax(-1, keepdim=True)
    return tokens[:, 0], chances.gather(1, tokens)[:, 0]
