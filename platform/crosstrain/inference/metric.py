"""The interface of metric plugins."""

from abc import ABC, abstractmethod
from typing import Any, ClassVar

from torch import Tensor

from crosstrain.utils.types import Batch


class Metric(ABC):
    """Base class of all metrics. `run.metrics: [{name: ..., <Options>}]` chooses and configures some.

    Validation and `crosstrain evaluate` ask it about every batch, after a forward of its own.
    """

    token_hits: ClassVar[str | None] = None  # of a language model: a share of hits, in place of `sums`

    def __init__(self, options: Any) -> None:
        self.options = options

    @abstractmethod
    def sums(self, outputs: Tensor, batch: Batch) -> Tensor:
        """Return sums over a batch [n], with n the same for all; they are added over batches and ranks in fp64.

        outputs: fp32, the model's for the batch without `labels`, such as logits [batch, classes]; of a language model
        the logits [batch, vocab_size] after the last position.
        """

    @abstractmethod
    def values(self, sums: list[float]) -> dict[str, float]:
        """Return named numbers of all samples, which are reported as val_NAME, from their sums."""
