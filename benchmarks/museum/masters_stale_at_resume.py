"""A checkpoint is loaded into the model, but not into the optimizer's copies, which the first step writes back.

https://github.com/NVIDIA/Megatron-LM/issues/174
"""

import torch

from crosstrain import registry

from . import Expected, resumed

EXPECTED = Expected("resume", cause=r"weight|master|stale|initial|update")


@registry.register_runner("masters_stale_at_resume")
class MastersStaleAtResume(registry.get("runner", "ddp")):
    """Goes on from initial values after a resumed run's first step."""

    def loaded(self):
        super().loaded()
        self.stale = resumed(self)

    def update(self):
        for name, p in self.model.weights.parameters().items() if self.stale else ():
            self.model.weights.initialize(name, p.data, torch.Generator().manual_seed(0))
        self.stale = False
        super().update()
