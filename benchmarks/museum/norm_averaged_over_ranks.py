"""The global norm is the mean of the ranks' norms, although expert-parallel ranks hold different experts.

https://github.com/deepspeedai/DeepSpeed/pull/8478
"""

from crosstrain import global_norm, registry

from . import Expected

EXPECTED = Expected(
    "norm",
    cause=r"averag|mean|expert|ranks",
    project="experts",
    base="megatron",
    options={"expert_parallel": 2},
)


@registry.register_runner("norm_averaged_over_ranks")
class NormAveragedOverRanks(registry.get("runner", "megatron")):
    """Averages the norms of each rank's gradients."""

    def gradient_norm(self, gradients):
        return self.world.all_reduce_sum(global_norm(gradients))[0] / self.world.size
