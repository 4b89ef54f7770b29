"""Loading gives every rank but the first an empty optimizer state.

https://github.com/huggingface/accelerate/pull/4206
"""

from crosstrain import registry

from . import Expected

EXPECTED = Expected("resume", cause=r"rank 1|moment|optimizer|state", base="fsdp")


@registry.register_runner("moments_of_first_rank")
class MomentsOfFirstRank(registry.get("runner", "fsdp")):
    """Throws away the moments on other ranks than the first."""

    def loaded(self):
        super().loaded()
        if self.world.rank > 0:
            for state in self.optimizer.state.values():
                state["exp_avg"].zero_()
                state["exp_avg_sq"].zero_()
