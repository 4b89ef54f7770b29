"""Gradients of experts are averaged over the ranks of ordinary data parallelism, although they hold different experts.

https://github.com/NVIDIA-NeMo/Megatron-Bridge/issues/5229
"""

import torch.distributed as dist

from crosstrain import registry

from . import Expected

EXPECTED = Expected(
    "gradients",
    cause=r"group|averag|reduc|other rank",
    parameter="*.mlp.experts.*",
    project="experts",
    base="megatron",
    options={"expert_parallel": 2},
)


@registry.register_runner("experts_averaged")
class ExpertsAveraged(registry.get("runner", "megatron")):
    """Averages the gradients of different experts."""

    def forward_backward(self, micro_batches, num_targets):
        loss = super().forward_backward(micro_batches, num_targets)
        for share in self.shares.values():
            if ".experts." in share.name:
                dist.all_reduce(share.owned.grad)
                share.owned.grad /= self.world.size
        return loss
