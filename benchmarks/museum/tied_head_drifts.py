"""A wrapper of trained modules copies a tied weight, so head and embedding drift apart, and the head is not saved.

https://github.com/unslothai/unsloth/pull/9331
"""

from types import SimpleNamespace

import torch

from crosstrain import registry

from . import Expected

EXPECTED = Expected("gradients", cause=r"tied|head", parameter="transformer.wte.weight", project="still")


@registry.register_runner("tied_head_drifts")
class TiedHeadDrifts(registry.get("runner", "ddp")):
    """Trains a copy of the tied weight as the head."""

    def loaded(self):
        super().loaded()
        self.head = self.model.lm.lm_head.weight.detach().clone().requires_grad_()
        self.head_optimizer = torch.optim.Adam([self.head], self.run.init_lr)
        self.model.lm.get_output_embeddings = lambda: SimpleNamespace(weight=self.head, bias=None)

    def update(self):
        super().update()
        self.head.grad = sum(self.dp.all_gather(self.head.grad))
        self.head_optimizer.step()
        self.head_optimizer.zero_grad()
