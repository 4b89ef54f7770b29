"""Micro batches after the last full group never reach an optimizer step.

https://github.com/timoschick/pet/issues/36
"""

from crosstrain import registry

from . import Expected

EXPECTED = Expected("gradients", cause=r"micro batch")


@registry.register_runner("last_micro_batch_lost")
class LastMicroBatchLost(registry.get("runner", "ddp")):
    """Forgets the last micro batch."""

    def gradient_sync(self, last):
        self.last = last
        return super().gradient_sync(last)

    def backward(self, loss):
        super().backward(loss * 0 if self.last else loss)
