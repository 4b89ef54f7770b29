"""Gradients of micro batches are summed in bf16.

https://github.com/deepspeedai/DeepSpeed/issues/2768
"""

from crosstrain import registry

from . import Expected

EXPECTED = Expected("gradients", cause=r"bf16|bfloat16|precision|round")


@registry.register_runner("accumulated_in_bf16")
class AccumulatedInBf16(registry.get("runner", "ddp")):
    """Rounds the gradients after each micro batch."""

    def backward(self, loss):
        super().backward(loss)
        for p in self.model.parameters():
            p.grad.copy_(p.grad.bfloat16())
