"""All-reduces of single tensors, not fused with others, give wrong results.

https://github.com/horovod/horovod/pull/358
"""

from crosstrain import registry

from . import Expected

EXPECTED = Expected("gradients", cause=r"summed|averag|divided", parameter="transformer.wte.weight")


@registry.register_runner("alone_not_averaged")
class AloneNotAveraged(registry.get("runner", "ddp")):
    """Sums the largest gradient over the ranks and averages all others."""

    def forward_backward(self, micro_batches, num_targets):
        loss = super().forward_backward(micro_batches, num_targets)
        largest = max(self.model.parameters(), key=lambda p: p.numel())
        largest.grad *= self.dp.size
        return loss
