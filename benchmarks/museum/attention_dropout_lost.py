"""The first evaluation sets the dropout rate of attention to 0, and training goes on without this dropout.

https://github.com/NVIDIA/Megatron-LM/pull/318
"""

from contextlib import contextmanager

from crosstrain import registry

from . import Expected

EXPECTED = Expected("forward", cause=r"dropout")


@registry.register_runner("attention_dropout_lost")
class AttentionDropoutLost(registry.get("runner", "ddp")):
    """Does not restore the dropout rate of attention after an evaluation."""

    @contextmanager
    def evaluating(self):
        for block in self.model.blocks():
            block.attn.attn_dropout.p = 0.0
        with super().evaluating():
            yield
