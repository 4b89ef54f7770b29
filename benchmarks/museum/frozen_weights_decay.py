"""Frozen weights are left in the optimizer, which gives them no gradient but lets them decay.

https://github.com/ahrefs/ocannl/issues/673
"""

from crosstrain import registry

from . import Expected

EXPECTED = Expected("update", cause=r"frozen|decay", parameter="transformer.*.weight", project="adapter")


@registry.register_runner("frozen_weights_decay")
class FrozenWeightsDecay(registry.get("runner", "ddp")):
    """Lets frozen matrices decay."""

    def update(self):
        super().update()
        rate = self.optimizer.param_groups[0]["lr"]
        for parameter in self.model.parameters():
            if not parameter.requires_grad and parameter.ndim > 1:
                parameter.mul_(1 - rate * self.run.weight_decay)
