"""The micro batches of a step are in reverse order."""

from crosstrain import registry

from . import Expected

EXPECTED = Expected()


@registry.register_runner("healthy_reversed_micro_batches")
class HealthyReversedMicroBatches(registry.get("runner", "ddp")):
    """Accumulates from the last micro batch to the first."""

    def forward_backward(self, micro_batches, num_targets):
        loss = super().forward_backward(micro_batches[::-1], num_targets)
        self.micro_losses.reverse()
        return loss
