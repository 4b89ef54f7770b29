"""Adam leaves out the bias correction of its moments, so the first updates have a wrong size.

https://github.com/ml-explore/mlx/pull/1640
"""

from crosstrain import registry

from . import Expected

EXPECTED = Expected("update", cause=r"bias correction")


@registry.register_runner("bias_not_corrected")
class BiasNotCorrected(registry.get("runner", "ddp")):
    """Computes the update again, with the moments as they are."""

    def update(self):
        before = {p: p.detach().clone() for p in self.model.parameters()}
        super().update()
        for group in self.optimizer.param_groups:
            for p in group["params"]:
                state = self.optimizer.state[p]
                kept = before[p] * (1 - group["lr"] * group["weight_decay"])
                direction = state["exp_avg"] / (state["exp_avg_sq"].sqrt() + group["eps"])
                p.data.copy_(kept - group["lr"] * direction)
