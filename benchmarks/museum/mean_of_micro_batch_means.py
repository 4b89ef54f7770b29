"""Each micro batch's loss is averaged over its own targets, then these means are averaged: short answers weigh more.

https://github.com/huggingface/transformers/pull/34191
"""

from crosstrain import registry

from . import Expected

EXPECTED = Expected("gradients", cause=r"micro batch|targets|normali[sz]|weigh", project="chat")


@registry.register_runner("mean_of_micro_batch_means")
class MeanOfMicroBatchMeans(registry.get("runner", "ddp")):
    """Gives all micro batches the same weight, for any number of targets."""

    def forward_backward(self, micro_batches, num_targets):
        even = num_targets / (len(micro_batches) * self.dp.size)
        self.factors = iter([even / max(m.num_targets, 1) for m in micro_batches])
        return super().forward_backward(micro_batches, num_targets)

    def backward(self, loss):
        super().backward(loss * next(self.factors))
