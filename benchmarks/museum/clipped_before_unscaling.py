"""Gradients are clipped while they are still multiplied by the loss scale.

https://github.com/Lightning-AI/pytorch-lightning/issues/9599
"""

from crosstrain import registry

from . import Expected

EXPECTED = Expected("update", cause=r"clip")


@registry.register_runner("clipped_before_unscaling")
class ClippedBeforeUnscaling(registry.get("runner", "ddp")):
    """Clips scaled gradients, to next to nothing; Adam hides it."""

    def setup(self):
        super().setup()
        self.run.grad_norm_clip /= self.precision.scaler.scale
