"""Gradients of micro batches are summed and never divided by their number.

https://github.com/huggingface/transformers/issues/35663
"""

from crosstrain import registry

from . import Expected

EXPECTED = Expected("gradients", cause=r"accumulat|micro batch")


@registry.register_runner("accumulated_undivided")
class AccumulatedUndivided(registry.get("runner", "ddp")):
    """Makes gradients grow with the accumulation."""

    def forward_backward(self, micro_batches, num_targets):
        self.accumulated = len(micro_batches)
        return super().forward_backward(micro_batches, num_targets)

    def backward(self, loss):
        super().backward(loss * self.accumulated)
