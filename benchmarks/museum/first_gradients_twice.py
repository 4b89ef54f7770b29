"""Gradients are not zeroed before the very first step, so this step counts them twice.

https://github.com/karpathy/llm.c/pull/548
"""

from crosstrain import registry

from . import Expected

EXPECTED = Expected("gradients", cause=r"2 times|twice|doubl")


@registry.register_runner("first_gradients_twice")
class FirstGradientsTwice(registry.get("runner", "ddp")):
    """Doubles the gradients of the first step, which Adam's normalisation hides."""

    begun = False

    def forward_backward(self, micro_batches, num_targets):
        loss = super().forward_backward(micro_batches, num_targets)
        if not self.begun:
            for p in self.model.parameters():
                p.grad *= 2
        self.begun = True
        return loss
