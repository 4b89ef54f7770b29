"""Gradients are summed over the ranks in fp64."""

import torch.distributed as dist

from crosstrain import Runner, registry

from . import Expected

EXPECTED = Expected()


@registry.register_runner("healthy_fp64_reduction")
class HealthyFp64Reduction(Runner):
    """Data parallelism by hand, in double precision."""

    def forward_backward(self, micro_batches, num_targets):
        loss = super().forward_backward(micro_batches, num_targets)
        for p in self.model.parameters():
            total = p.grad.double()
            dist.all_reduce(total)
            p.grad.copy_(total / self.dp.size)
        return loss
