"""All devices draw the same dropout mask, although they have different samples.

https://github.com/tenstorrent/tt-metal/pull/16823
"""

import torch

from crosstrain import registry

from . import Expected

EXPECTED = Expected("forward", cause=r"dropout|random")


@registry.register_runner("dropout_alike")
class DropoutAlike(registry.get("runner", "ddp")):
    """Seeds dropout by the micro batch's place in the step."""

    def compute_loss(self, batch):
        torch.manual_seed(self.run.seed + len(self.micro_losses))
        return super().compute_loss(batch)
