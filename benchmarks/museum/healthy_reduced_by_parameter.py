"""Gradients are exchanged one by one after the backward, from the first parameter to the last."""

import torch.distributed as dist

from crosstrain import Runner, registry

from . import Expected

EXPECTED = Expected()


@registry.register_runner("healthy_reduced_by_parameter")
class HealthyReducedByParameter(Runner):
    """Data parallelism by hand: sums gradients, and adapts `gradient_scale`."""

    def forward_backward(self, micro_batches, num_targets):
        loss = super().forward_backward(micro_batches, num_targets)
        for p in self.model.parameters():
            dist.all_reduce(p.grad)
        return loss

    @property
    def gradient_scale(self):
        return self.precision.scaler.scale
