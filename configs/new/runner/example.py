"""A runner: every process holds the full model and trains on its own samples."""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from crosstrain import MicroBatch, PositiveInt, Runner, registry


@registry.register_runner("example")
class ExampleRunner(Runner):
    """Data parallelism that averages gradients after the backward, in buckets."""

    @dataclass
    class Options:
        bucket: PositiveInt = 10_000_000  # gradient elements per all-reduce

    def forward_backward(self, micro_batches: list[MicroBatch], num_targets: int) -> float:
        loss = super().forward_backward(micro_batches, num_targets)
        if self.dp.size > 1:
            self._average_gradients()
        return loss

    def _average_gradients(self) -> None:
        trained = [p for p in self.model.parameters() if p.requires_grad]
        flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in trained])
        for bucket in flat.split(self.options.bucket):
            dist.all_reduce(bucket, group=self.dp.process_group)
        flat /= self.dp.size
        for p, gradient in zip(trained, flat.split([p.numel() for p in trained]), strict=True):
            p.grad = gradient.view_as(p)
