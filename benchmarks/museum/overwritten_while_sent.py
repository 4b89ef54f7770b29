"""A gradient buffer is overwritten before the communication that reads it has ended.

https://github.com/deepspeedai/DeepSpeed/pull/5606
"""

from crosstrain import registry

from . import Expected

EXPECTED = Expected("gradients", cause=r"step 6|buffer|race|part", parameter="transformer.h.0.mlp.c_fc.weight", steps=8)


@registry.register_runner("overwritten_while_sent")
class OverwrittenWhileSent(registry.get("runner", "ddp")):
    """Loses a row of one gradient from step 6 on."""

    step = 0

    def forward_backward(self, micro_batches, num_targets):
        loss = super().forward_backward(micro_batches, num_targets)
        self.step += 1
        if self.step >= 6:
            self.model.blocks()[0].mlp.c_fc.weight.grad[0] = 0.0
        return loss
