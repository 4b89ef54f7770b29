"""A fused optimizer writes its fp32 moments back in the dtype of the parameters.

https://github.com/databricks/flashoptim/issues/2
"""

from crosstrain import registry

from . import Expected

EXPECTED = Expected("state", cause=r"bf16|bfloat16|precision|round")


@registry.register_runner("moments_in_bf16")
class MomentsInBf16(registry.get("runner", "ddp")):
    """Rounds the moments after each update."""

    def update(self):
        super().update()
        for state in self.optimizer.state.values():
            state["exp_avg"].copy_(state["exp_avg"].bfloat16())
            state["exp_avg_sq"].copy_(state["exp_avg_sq"].bfloat16())
