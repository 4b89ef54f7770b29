"""Gradients are divided by the loss scale, and then clipped."""

from crosstrain import registry

from . import Expected

EXPECTED = Expected()


@registry.register_runner("healthy_unscaled_first")
class HealthyUnscaledFirst(registry.get("runner", "ddp")):
    """Unscales and clips in two passes."""

    def optimizer_step(self, apply=True):
        for p in self.model.parameters():
            p.grad /= super().gradient_scale
        self.unscaled = True
        try:
            return super().optimizer_step(apply)
        finally:
            self.unscaled = False

    unscaled = False

    @property
    def gradient_scale(self):
        return 1.0 if self.unscaled else super().gradient_scale
