"""Sometimes a gradient bucket is exchanged while the backward still writes to it.

https://github.com/deepspeedai/DeepSpeed/issues/8061
"""

from crosstrain import registry

from . import Expected

EXPECTED = Expected("gradients", cause=r"rank 1|one rank|bucket|race|step 4", steps=8)


@registry.register_runner("sent_before_complete")
class SentBeforeComplete(registry.get("runner", "ddp")):
    """Loses the gradients of one rank in one step."""

    step = 0

    def forward_backward(self, micro_batches, num_targets):
        self.step += 1
        return super().forward_backward(micro_batches, num_targets)

    def _exchange(self, bucket):
        if self.step == 4 and self.world.rank == 1:
            bucket.buffer().zero_()
        return super()._exchange(bucket)
