"""Samples packed into a row attend to earlier samples, although positions restart.

https://github.com/huggingface/nanoVLM/pull/204
"""

import torch

from crosstrain import registry

from . import Expected

EXPECTED = Expected("forward", cause=r"attention|mask|document|forward", project="packed")


@registry.register_runner("documents_see_each_other")
class DocumentsSeeEachOther(registry.get("runner", "ddp")):
    """Gives attention a mask without document boundaries."""

    def compute_loss(self, batch):
        return super().compute_loss(batch | {"attention_mask": torch.ones_like(batch["input_ids"])})

    def evaluate(self, batch, *mode):
        return super().evaluate(batch | {"attention_mask": torch.ones_like(batch["input_ids"])}, *mode)
