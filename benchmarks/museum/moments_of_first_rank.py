"""Of a sharded optimizer's state the first rank's alone is saved, and the others go on with an empty one.

https://github.com/huggingface/transformers/pull/23111
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
