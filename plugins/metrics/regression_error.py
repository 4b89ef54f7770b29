"""Regression errors."""

import torch

from crosstrain import Batch, Metric, registry


@registry.register_metric("regression_error")
class RegressionError(Metric):
    """MAE, RMSE and R2 over all elements; labels have the shape of the outputs."""

    def sums(self, outputs: torch.Tensor, batch: Batch) -> torch.Tensor:
        labels = batch["labels"].double().reshape(outputs.shape)
        errors = outputs.double() - labels
        ones = torch.ones_like(labels)
        return torch.stack([x.sum() for x in (ones, errors.abs(), errors.square(), labels, labels.square())])

    def values(self, sums: list[float]) -> dict[str, float]:
        count, absolute, squared, total, squares = sums
        spread = squares - total**2 / count  # sum of squared deviations of the labels from their mean
        r2 = 1 - squared / spread if spread > 0 else float("nan")
        return {"mae": absolute / count, "rmse": (squared / count) ** 0.5, "r2": r2}
