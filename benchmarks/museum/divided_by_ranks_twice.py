"""The loss is divided by the targets of all ranks, and data parallelism divides the gradients again.

https://github.com/meta-pytorch/torchtune/pull/2172
"""

from crosstrain import registry

from . import Expected

EXPECTED = Expected("gradients", cause=r"divided .*(once more|once too often|twice|again)|averaged twice")


@registry.register_runner("divided_by_ranks_twice")
class DividedByRanksTwice(registry.get("runner", "ddp")):
    """Averages over the ranks twice."""

    def forward_backward(self, micro_batches, num_targets):
        loss = super().forward_backward(micro_batches, num_targets)
        for p in self.model.parameters():
            p.grad /= self.dp.size
        return loss
