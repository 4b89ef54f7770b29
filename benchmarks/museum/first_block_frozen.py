"""Recomputation gives no gradients to a block whose input needs none, such as the first one after frozen embeddings.

https://github.com/facebookresearch/fairseq/issues/3583
"""

from crosstrain import registry

from . import Expected

EXPECTED = Expected("gradients", cause=r"zero|no gradient|left out", parameter="transformer.h.0.*", project="adapter")


@registry.register_runner("first_block_frozen")
class FirstBlockFrozen(registry.get("runner", "ddp")):
    """Detaches the output of the first block."""

    def prepare(self, model, make_optimizer):
        super().prepare(model, make_optimizer)
        model.blocks()[0].register_forward_hook(lambda _, inputs, output: output.detach() + 0 * output)
