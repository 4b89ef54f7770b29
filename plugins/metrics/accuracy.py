"""Accuracy of classification and next-token prediction."""

import torch

from crosstrain import IGNORE_INDEX, Batch, Metric, registry


@registry.register_metric("accuracy")
class Accuracy(Metric):
    """Fraction of labels that get the highest logit; for language models, the fraction of all target tokens."""

    token_hits = "accuracy"

    def sums(self, outputs: torch.Tensor, batch: Batch) -> torch.Tensor:
        labels = batch["labels"]
        known = labels != IGNORE_INDEX
        return torch.stack([((outputs.argmax(-1) == labels) & known).sum(), known.sum()])

    def values(self, sums: list[float]) -> dict[str, float]:
        right, known = sums
        return {"accuracy": right / known if known else float("nan")}
