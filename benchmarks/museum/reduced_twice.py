"""Two parts of the program all-reduce the same gradients.

https://github.com/PaddlePaddle/Paddle/pull/30437
"""

import torch.distributed as dist

from crosstrain import registry

from . import Expected

EXPECTED = Expected("gradients", cause=r"summed|all-reduced? .*twice|2 times")


@registry.register_runner("reduced_twice")
class ReducedTwice(registry.get("runner", "ddp")):
    """All-reduces gradients that are reduced already."""

    def forward_backward(self, micro_batches, num_targets):
        loss = super().forward_backward(micro_batches, num_targets)
        for p in self.model.parameters():
            dist.all_reduce(p.grad)
        return loss
