"""Each rank divides by the targets of its own samples, and then gradients are averaged over the ranks.

https://github.com/pytorch/torchtitan/pull/2206
"""

from crosstrain import registry

from . import Expected

EXPECTED = Expected("gradients", cause=r"(own|each) rank|targets|normali[sz]|weigh", project="chat")


@registry.register_runner("mean_of_rank_means")
class MeanOfRankMeans(registry.get("runner", "ddp")):
    """Gives all ranks the same weight, for any number of targets."""

    def forward_backward(self, micro_batches, num_targets):
        mine = sum(m.num_targets for m in micro_batches)
        self.factor = num_targets / (mine * self.dp.size)
        return super().forward_backward(micro_batches, num_targets)

    def backward(self, loss):
        super().backward(loss * self.factor)
