"""The forward of a reference model advances the random numbers of the trained model's dropout.

https://github.com/huggingface/trl/issues/7083
"""

import torch

from crosstrain import registry

from . import Expected

EXPECTED = Expected("forward", cause=r"random|dropout")


@registry.register_runner("reference_draws_numbers")
class ReferenceDrawsNumbers(registry.get("runner", "ddp")):
    """Draws random numbers before each forward."""

    def compute_loss(self, batch):
        torch.rand(16)
        return super().compute_loss(batch)
