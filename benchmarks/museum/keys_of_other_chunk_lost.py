"""The backward of ring attention loses the gradients of keys and values that were sent from other ranks.

https://github.com/NVIDIA/TransformerEngine/issues/3342
"""

from crosstrain import registry

from . import Expected, matching

EXPECTED = Expected("gradients", cause=r"backward|module|divided", parameter="*.attn.c_attn.*", project="still")


@registry.register_runner("keys_of_other_chunk_lost")
class KeysOfOtherChunkLost(registry.get("runner", "ddp")):
    """Halves the gradients of keys and values."""

    def forward_backward(self, micro_batches, num_targets):
        loss = super().forward_backward(micro_batches, num_targets)
        for parameter in matching(self.model, "*.attn.c_attn.*").values():
            parameter.grad[..., parameter.shape[-1] // 3 :] *= 0.5
        return loss
