"""An all-reduce is replaced by a reduce-scatter and an all-gather."""

import torch
import torch.distributed as dist

from crosstrain import Runner, registry

from . import Expected

EXPECTED = Expected()


@registry.register_runner("healthy_scatter_and_gather")
class HealthyScatterAndGather(Runner):
    """Data parallelism by hand, in the two halves of an all-reduce."""

    def forward_backward(self, micro_batches, num_targets):
        loss = super().forward_backward(micro_batches, num_targets)
        parameters = list(self.model.parameters())
        flat = torch.cat([p.grad.flatten() for p in parameters])
        padded = torch.nn.functional.pad(flat, (0, -len(flat) % self.dp.size))
        mine = padded.new_empty(len(padded) // self.dp.size)
        dist.reduce_scatter_single(mine, padded)
        dist.all_gather_single(padded, mine / self.dp.size)
        for p, gradient in zip(parameters, padded[: len(flat)].split([p.numel() for p in parameters]), strict=True):
            p.grad.copy_(gradient.view_as(p))
        return loss
