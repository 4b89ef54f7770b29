"""The warmup counts steps from 0, so the first step has a learning rate of 0 and is lost.

https://github.com/meta-pytorch/torchtune/issues/2010
"""

from crosstrain import registry

from . import Expected, resumed

EXPECTED = Expected("learning rate", cause=r"warm|first step|step 1\b|\b0(\.0)? instead")


@registry.register_runner("warmup_from_zero")
class WarmupFromZero(registry.get("runner", "ddp")):
    """Takes the first step with a learning rate of 0."""

    def set_learning_rate(self, rate):
        super().set_learning_rate(rate if resumed(self) else 0.0)
