"""Gradients of micro batches are summed in fp64."""

import torch.distributed as dist

from crosstrain import Runner, registry

from . import Expected

EXPECTED = Expected()


@registry.register_runner("healthy_accumulated_in_fp64")
class HealthyAccumulatedInFp64(Runner):
    """Keeps its own sums of gradients."""

    def backward(self, loss):
        super().backward(loss)
        for p in self.model.parameters():
            self.sums[p] = self.sums.get(p, 0.0) + p.grad.double()
            p.grad = None

    def forward_backward(self, micro_batches, num_targets):
        self.sums = {}
        loss = super().forward_backward(micro_batches, num_targets)
        for p, total in self.sums.items():
            dist.all_reduce(total)
            p.grad = (total / self.dp.size).float()
        return loss
