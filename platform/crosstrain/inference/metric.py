"""The interface of metric plugins."""

from abc import ABC, abstractmethod
from typing import Any, ClassVar

from torch import Tensor

from crosstrain.utils.types import Batch


class Metric(ABC):
    """Base class of all metrics. `run.metrics: [{name: ..., <Options>}]` chooses and configures them.

    Validation and `crosstrain evaluate` call it for every batch, with the outputs of an extra forward.
    """

    token_hits: ClassVar[str | None] = None  # for language models: report the rate of hits under this name, not `sums`

    def __init__(self, options: Any) -> None:
        self.options = options

    @abstractmethod
    def sums(self, outputs: Tensor, batch: Batch) -> Tensor:
        """Return sums over a batch [n], with n the same for all; they are added over batches and ranks in fp64.

        outputs: fp32 outputs of the model for the batch without `labels`, such as logits [batch, classes]. For a
        language model, the logits [batch, vocab_size] after the last position.
        """

    @abstractmethod
    def values(self, sums: list[float]) -> dict[str, float]:
        """Compute named numbers over all samples from their sums; they are reported as val_NAME."""
