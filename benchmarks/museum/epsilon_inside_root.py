"""Adam adds epsilon to the second moment, inside the square root, instead of to the root.

https://github.com/FluxML/Flux.jl/pull/448
"""

from crosstrain import registry

from . import Expected

EXPECTED = Expected("update", cause=r"epsilon|optimizer, its settings")


@registry.register_runner("epsilon_inside_root")
class EpsilonInsideRoot(registry.get("runner", "ddp")):
    """Computes the update again, with epsilon inside the root."""

    def update(self):
        before = {p: p.detach().clone() for p in self.model.parameters()}
        super().update()
        for group in self.optimizer.param_groups:
            first, second = group["betas"]
            for p in group["params"]:
                state = self.optimizer.state[p]
                mean = state["exp_avg"] / (1 - first ** state["step"])
                square = state["exp_avg_sq"] / (1 - second ** state["step"])
                kept = before[p] * (1 - group["lr"] * group["weight_decay"])
                p.data.copy_(kept - group["lr"] * mean / (square + group["eps"]).sqrt())
