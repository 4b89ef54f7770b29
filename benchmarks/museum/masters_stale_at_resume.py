"""A checkpoint is loaded into the model but not into the optimizer's copies, and the first step overwrites the weights
with these copies.

https://github.com/NVIDIA/Megatron-LM/issues/174
"""

import torch

from crosstrain import registry

from . import Expected, resumed

EXPECTED = Expected("resume", cause=r"weight|master|stale|initial|update")


@registry.register_runner("masters_stale_at_resume")
class MastersStaleAtResume(registry.get("runner", "ddp")):
    """Resets the weights to initial values before the first step of a resumed run."""

    def loaded(self):
        super().loaded()
        self.stale = resumed(self)

    def update(self):
        for name, p in self.model.weights.parameters().items() if self.stale else ():
            self.model.weights.initialize(name, p.data, torch.Generator().manual_seed(0))
        self.stale = False
        super().update()
