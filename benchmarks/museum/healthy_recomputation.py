"""Activations are recomputed in the backward, with the dropout of the forward."""

from functools import partial

from torch.utils.checkpoint import checkpoint

from crosstrain import registry

from . import Expected

EXPECTED = Expected()


@registry.register_runner("healthy_recomputation")
class HealthyRecomputation(registry.get("runner", "ddp")):
    """Checkpoints activations."""

    def prepare(self, model, make_optimizer):
        for block in model.blocks():
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
        super().prepare(model, make_optimizer)
