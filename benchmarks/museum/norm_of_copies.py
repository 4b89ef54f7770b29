"""The norm sums squares over all tensor-parallel ranks, although some tensors are copies and not parts.

https://github.com/NVIDIA-NeMo/RL/pull/3788
"""

from crosstrain import registry

from . import Expected

EXPECTED = Expected(
    "norm",
    cause=r"norm.*(twice|copies|each rank)|twice.*norm",
    project="still",
    base="megatron",
    options={"tensor_parallel": 2},
)


@registry.register_runner("norm_of_copies")
class NormOfCopies(registry.get("runner", "megatron")):
    """Counts a replicated tensor once per rank."""

    def prepare(self, model, make_optimizer):
        super().prepare(model, make_optimizer)
        for share in self.shares.values():
            share.norm_weight = 1.0
