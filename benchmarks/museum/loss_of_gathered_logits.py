"""Exponentials of logits that are already gathered are summed over the ranks: the loss is log(ranks) too high.

https://github.com/NVIDIA/Megatron-LM/issues/7452
"""

import math

from crosstrain import registry

from . import Expected

EXPECTED = Expected("forward", cause=r"forward|loss", project="still", base="megatron", options={"tensor_parallel": 2})


@registry.register_runner("loss_of_gathered_logits")
class LossOfGatheredLogits(registry.get("runner", "megatron")):
    """Adds a constant to every token's loss."""

    def compute_loss(self, batch):
        return super().compute_loss(batch) + math.log(self.tensor.size) * self.model.num_targets(batch)

    def evaluate(self, batch, *mode):
        return super().evaluate(batch, *mode) + math.log(self.tensor.size) * self.model.num_targets(batch)
