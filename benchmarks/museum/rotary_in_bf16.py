"""Casting the model to bf16 also rounds the frequencies of its rotary positions.

https://github.com/NVIDIA-NeMo/Automodel/pull/2549
"""

from crosstrain import registry

from . import Expected

EXPECTED = Expected("gradients", cause=r"bf16|bfloat16|precision|round|rotary|position", project="qwen")


@registry.register_runner("rotary_in_bf16")
class RotaryInBf16(registry.get("runner", "ddp")):
    """Rounds the rotary frequencies."""

    def loaded(self):
        super().loaded()
        frequencies = self.model.lm.model.rotary_emb.inv_freq
        frequencies.copy_(frequencies.bfloat16())
