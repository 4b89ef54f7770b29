"""Only the first rank's part of a sharded optimizer state is saved; the other ranks continue with an empty state.

https://github.com/huggingface/transformers/pull/23111
"""

from crosstrain import registry

from . import Expected

EXPECTED = Expected("resume", cause=r"rank 1|moment|optimizer|state", base="fsdp")


@registry.register_runner("moments_of_first_rank")
class MomentsOfFirstRank(registry.get("runner", "fsdp")):
    """Discards the moments on all ranks except the first."""

    def loaded(self):
        super().loaded()
        if self.world.rank > 0:
            for state in self.optimizer.state.values():
                state["exp_avg"].zero_()
                state["exp_avg_sq"].zero_()
