"""Activations are recomputed in the backward with different dropout than in the forward.

https://github.com/allenai/OLMo-core/pull/828
"""

from functools import partial

from torch.utils.checkpoint import checkpoint

from crosstrain import registry

from . import Expected

EXPECTED = Expected("gradients", cause=r"dropout|random|recomput|checkpointing")


@registry.register_runner("dropout_drawn_anew")
class DropoutDrawnAnew(registry.get("runner", "ddp")):
    """Checkpoints activations without the state of the random numbers."""

    def prepare(self, model, make_optimizer):
        for block in model.blocks():
            block.forward = partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False)
        super().prepare(model, make_optimizer)
