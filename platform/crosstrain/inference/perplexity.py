"""Compute the loss, the perplexity and the metrics of a split."""

import math
from dataclasses import dataclass, field
from itertools import islice

import torch

from crosstrain.config.registry import registry
from crosstrain.data.dataset import Dataset
from crosstrain.data.loader import evaluation_batches
from crosstrain.engine.runner import Runner, recorded_means, to_device
from crosstrain.inference.metric import Metric
from crosstrain.inference.policy import Policy
from crosstrain.modeling.base import Sums, add_sums
from crosstrain.modeling.forward_mode import PLAIN, ForwardMode, takes_mode
from crosstrain.modeling.objective import Objective
from crosstrain.utils.errors import ConfigError
from crosstrain.utils.program import blamed
from crosstrain.utils.types import MicroBatch, Step
from crosstrain.utils.units import disjoint


@dataclass
class LossMetrics:
    """Mean loss per target (in nats for tokens), and the metrics recorded by the model and by `run.metrics`."""

    loss: float
    targets: int
    unit: str = "tokens"
    more: dict[str, float] = field(default_factory=dict)

    @property
    def perplexity(self) -> float:
        """The exponential of the loss; infinity if it overflows a float."""
        return math.exp(self.loss) if self.loss < 700 else math.inf

    @property
    def of_tokens(self) -> bool:
        return self.unit == "tokens"

    @property
    def named(self) -> dict[str, float]:
        """All metrics, as name -> value. Raises TrainingError for a duplicate name."""
        return disjoint({"loss": self.loss} | ({"perplexity": self.perplexity} if self.of_tokens else {}), self.more)

    def line(self, form: str) -> str:
        numbers = " | ".join(f"{name} {value:{form}}" for name, value in self.named.items())
        return f"{numbers} ({self.targets} {self.unit})"


def evaluate_loss(
    runner: Runner, dataset: Dataset, micro_batch: int, max_samples: int | None = None, num_workers: int = 0
) -> LossMetrics:
    """Compute loss and metrics over the first `max_samples` samples; None: over all samples. Collective.

    The results are the same on every rank.
    """
    model = runner.model
    metrics: list[Metric] = [registry.get("metric", m.name)(m.options) for m in runner.run.metrics]
    total = targets = 0.0
    recorded: Sums = {}
    batches = evaluation_batches(
        dataset,
        micro_batch,
        dp_rank=runner.dp.rank,
        dp_size=runner.dp.size,
        max_samples=max_samples,
        num_workers=num_workers,
        vocab_size=model.vocab_size,
    )
    policy = Policy(runner, dataset)
    hits = [metric.token_hits for metric in metrics if metric.token_hits and model.predicts_tokens]
    metrics = [metric for metric in metrics if metric.token_hits not in hits]

    def record(found: torch.Tensor) -> None:
        for name in hits:
            model.record(name, found)

    if hits and not takes_mode(model):
        raise ConfigError(f"run.metrics: {type(model).__name__}.forward has no parameter `mode`, which {hits[0]} needs")
    mode = ForwardMode(hits=record) if hits else PLAIN
    scores = [torch.zeros(1, dtype=torch.float64)] * len(metrics)
    with runner.evaluating():
        for read, counts in batches:
            micro = _begun(read, runner.objective, policy)
            made = model.take_recorded()
            if metrics:
                given = {key: value for key, value in micro.data.items() if key != "labels"}
                outputs, batch = runner.evaluate(given).float(), to_device(micro.data, runner.device)
                shapes = ", ".join(f"{name} {[*t.shape]}" for name, t in {"outputs": outputs, **batch}.items())
                for number, metric in enumerate(metrics):
                    with blamed(f"run.metrics: {type(metric).__name__} failed in sums, given {shapes}"):
                        sums = metric.sums(outputs, batch).double().cpu()
                    scores[number] = scores[number] + (sums if counts else torch.zeros_like(sums))
            model.take_recorded()  # discard values that the model recorded in the metrics' forward
            loss = runner.evaluate(micro.data, mode).item()
            if counts:
                total += loss
                targets += micro.num_targets
                add_sums(recorded, made)
                add_sums(recorded, model.take_recorded())
    flat = [number for score in scores for number in score.tolist()]
    total, targets, *flat = runner.dp.all_reduce_sum(total, targets, *flat, tag="validation loss")
    more, rest = dict.fromkeys(hits, math.nan) | recorded_means(recorded, runner.world), iter(flat)
    for metric, score in zip(metrics, scores, strict=True):
        with blamed(f"run.metrics: {type(metric).__name__} failed in values"):
            more = disjoint(more, metric.values(list(islice(rest, len(score)))))
    return LossMetrics(total / max(targets, 1), int(targets), runner.objective.targets, more)


def _begun(micro: MicroBatch, objective: Objective, policy: Policy) -> MicroBatch:
    """Return the micro batch as the objective evaluates it, with its targets counted."""
    step = Step([micro])
    step.numbers = list(micro.numbers)
    (begun,) = objective.begin_step(step, policy)
    begun.num_targets = objective.num_targets(begun.data)
    return begun
