"""The interface of metric plugins."""

from abc import ABC, abstractmethod
from typing import Any, ClassVar

from torch import Tensor

from crosstrain.utils.types import Batch


class Metric(ABC):
    """Base class of all metrics. `run.metrics: [{name: ..., <Options>}]` chooses and configures metrics.

    Validation and `crosstrain evaluate` call `sums` for every batch, with the outputs of an extra forward.
    """

    token_hits: ClassVar[str | None] = None  # name to report for a language model's argmax accuracy; replaces `sums`

    def __init__(self, options: Any) -> None:
        self.options = options

    @abstractmethod
    def sums(self, outputs: Tensor, batch: Batch) -> Tensor:
        """Return n sums over a batch, as a tensor [n]; they are added over batches and ranks in fp64.

        n must be the same for all batches. outputs: fp32 outputs of the model for the batch without `labels`, such as
        logits [batch, classes]; for a language model, the logits [batch, vocab_size] after the last position.
        """

    @abstractmethod
    def values(self, sums: list[float]) -> dict[str, float]:
        """Compute name -> metric from the sums over all samples; metrics are reported as val_NAME."""
