"""A chunked loss adds up the gradient of the head's weight in bf16.

https://github.com/linkedin/Liger-Kernel/pull/830
"""

from crosstrain import registry

from . import Expected

EXPECTED = Expected("gradients", cause=r"bf16|bfloat16|precision|round", parameter="transformer.wte.weight")


@registry.register_runner("head_in_bf16")
class HeadInBf16(registry.get("runner", "ddp")):
    """Rounds the gradient of the head."""

    def forward_backward(self, micro_batches, num_targets):
        loss = super().forward_backward(micro_batches, num_targets)
        head = self.model.lm.get_output_embeddings().weight
        head.grad.copy_(head.grad.bfloat16())
        return loss
