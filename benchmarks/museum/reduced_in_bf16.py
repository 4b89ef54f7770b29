"""Gradients are communicated in bf16, and partial sums are rounded at every hop.

https://github.com/NVIDIA/Megatron-LM/issues/6199
"""

from crosstrain import registry

from . import Expected

EXPECTED = Expected("gradients", cause=r"bf16|bfloat16|precision|round")


@registry.register_runner("reduced_in_bf16")
class ReducedInBf16(registry.get("runner", "ddp")):
    """Rounds gradients before the all-reduce."""

    def _exchange(self, bucket):
        bucket.buffer().copy_(bucket.buffer().bfloat16())
        return super()._exchange(bucket)
