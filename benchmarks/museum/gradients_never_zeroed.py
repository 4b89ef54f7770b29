"""zero_grad is never called after a step, so each step adds to the gradients of all earlier steps.

https://github.com/meta-pytorch/torchforge/pull/71
"""

from crosstrain import registry

from . import Expected

EXPECTED = Expected("gradients", cause=r"earlier step|previous|step before|zero|left over|stale")


@registry.register_runner("gradients_never_zeroed")
class GradientsNeverZeroed(registry.get("runner", "ddp")):
    """Adds the gradients of earlier steps."""

    def forward_backward(self, micro_batches, num_targets):
        loss = super().forward_backward(micro_batches, num_targets)
        kept = getattr(self, "kept", {})
        for p in self.model.parameters():
            p.grad += kept.get(p, 0.0)
        self.kept = {p: p.grad.clone() for p in self.model.parameters()}
        return loss
