"""A policy's loss is averaged over the tokens of each micro batch, then over micro batches: few tokens weigh more.

https://github.com/allenai/open-instruct/pull/1161
"""

from crosstrain import registry

from . import Expected

EXPECTED = Expected("gradients", cause=r"over micro batches", project="policy")


@registry.register_runner("policy_of_micro_batch_means")
class PolicyOfMicroBatchMeans(registry.get("runner", "ddp")):
    """Gives all micro batches the same weight, for any number of sampled tokens."""

    def forward_backward(self, micro_batches, num_targets):
        even = num_targets / (len(micro_batches) * self.dp.size)
        self.factors = iter([even / max(m.num_targets, 1) for m in micro_batches])
        return super().forward_backward(micro_batches, num_targets)

    def backward(self, loss):
        super().backward(loss * next(self.factors))
