"""Under sequence parallelism, the targets of a sample count once for each rank that holds a part of it.

https://github.com/huggingface/transformers/issues/46775
"""

from crosstrain import registry

from . import Expected

EXPECTED = Expected("forward", cause=r"target|divided|times|ranks")


@registry.register_runner("targets_of_two_ranks")
class TargetsOfTwoRanks(registry.get("runner", "ddp")):
    """Divides the loss by twice the number of targets."""

    def forward_backward(self, micro_batches, num_targets):
        return super().forward_backward(micro_batches, 2 * num_targets)
