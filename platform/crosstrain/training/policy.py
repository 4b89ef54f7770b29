"""The model with its current weights, for objectives that generate samples during training."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from crosstrain.distributed.group import Group
from crosstrain.engine.held_state import REFERENCE
from crosstrain.engine.runner import Runner
from crosstrain.inference.decoder import DecodeState
from crosstrain.inference.generation import Sampling, choose
from crosstrain.modeling.forward_mode import ForwardMode
from crosstrain.utils.rng import generator
from crosstrain.utils.types import Batch, MicroBatch, Sample


class RunnerPolicy:
    """Implements `modeling.objective.Policy` with a runner. All ranks call the methods together."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        # A forward may contain collectives, so these ranks decode together until all their completions have ended.
        self._ranks = runner.dp if runner.capabilities.exact else Group()

    def generate(
        self, prompts: MicroBatch, n: int, max_new_tokens: int, temperature: float = 1.0, ends: Sequence[int] = ()
    ) -> list[list[int]]:
        """Return `n` completions of each row; see `Policy.generate`."""
        runner, sampling = self._runner, Sampling(temperature=temperature)
        random = [generator(runner.run.seed, "policy", number, i) for number in prompts.numbers for i in range(n)]
        completions: list[list[int]] = [[] for _ in random]
        with runner.timers("generate"), runner.evaluating():
            state = DecodeState(runner, [row for row in _rows(prompts.data) for _ in range(n)])
            for _ in range(max_new_tokens):
                tokens = choose(state.logits(), sampling, random)
                for completion, token in zip(completions, tokens.tolist(), strict=True):
                    if not completion or completion[-1] not in ends:
                        completion.append(token)
                going = any(completion[-1] not in ends for completion in completions)
                if not self._ranks.all_reduce_sum(going)[0]:
                    break
                state.append(tokens)
        return completions

    def log_probabilities(self, batch: Batch) -> Tensor:
        """Return log-probabilities [rows, length] of the labels; see `Policy.log_probabilities`."""
        with self._runner.evaluating():
            return self._runner.evaluate(batch, ForwardMode(reduce=torch.neg)).float().cpu()

    def reference_log_probabilities(self, batch: Batch) -> Tensor:
        """Return the labels' log-probabilities under the run's initial weights."""
        self._runner.held.swap(REFERENCE)
        try:
            return self.log_probabilities(batch)
        finally:
            self._runner.held.swap(REFERENCE)


def _rows(batch: Batch) -> Iterator[Sample]:
    """Yield the prompts of a batch, without padding."""
    mask = batch.get("attention_mask")
    for number, ids in enumerate(batch["input_ids"]):
        yield {"input_ids": (ids if mask is None else ids[mask[number].bool()]).numpy()}
