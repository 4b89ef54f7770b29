"""While micro batches accumulate, each rank clips its own gradients before they are summed over the ranks.

https://github.com/huggingface/diffusers/pull/721
"""

from torch.nn.utils import clip_grad_norm_

from crosstrain import registry

from . import Expected

EXPECTED = Expected("gradients", cause=r"clip|before")


@registry.register_runner("clipped_before_reduction")
class ClippedBeforeReduction(registry.get("runner", "ddp")):
    """Clips the sums of gradients between micro batches."""

    def gradient_sync(self, last):
        self.last = last
        return super().gradient_sync(last)

    def backward(self, loss):
        super().backward(loss)
        if not self.last:
            clip_grad_norm_(self.model.parameters(), self.run.grad_norm_clip * self.gradient_scale)
