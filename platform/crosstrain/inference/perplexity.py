"""Loss and perplexity of a split."""

from __future__ import annotations

import math
from dataclasses import dataclass

from crosstrain.data.dataset import Dataset
from crosstrain.data.loader import evaluation_batches
from crosstrain.engine.runner import Runner


@dataclass
class LossMetrics:
    """Mean loss in nats per target token over `targets` of them."""

    loss: float
    targets: int

    @property
    def perplexity(self) -> float:
        """exp(loss); infinite where that is beyond a float."""
        return math.exp(self.loss) if self.loss < 700 else math.inf


def evaluate_loss(
    runner: Runner, dataset: Dataset, micro_batch: int, max_samples: int | None = None, num_workers: int = 0
) -> LossMetrics:
    """Loss over the first `max_samples` samples of a split (None: all), the same on every rank. Collective."""
    total = targets = 0.0
    batches = evaluation_batches(
        dataset, micro_batch, dp_rank=runner.dp.rank, dp_size=runner.dp.size,
        max_samples=max_samples, num_workers=num_workers, num_targets=runner.model.num_targets,
    )  # fmt: skip
    with runner.evaluating():
        for micro, counts in batches:
            loss = runner.evaluate(micro.data).item()
            if counts:
                total += loss
                targets += micro.num_targets
    total, targets = runner.dp.all_reduce_sum(total, targets)
    return LossMetrics(total / max(targets, 1), int(targets))
