"""Muon orthogonalizes each tensor-parallel shard of a matrix by itself.

https://github.com/deepspeedai/DeepSpeed/issues/8437
"""

import torch

from crosstrain import registry

from . import Expected

EXPECTED = Expected("update", cause=r"optimizer|shard|orthogonal", parameter="transformer.h.*.weight", project="muon")


@registry.register_runner("muon_of_own_rows")
class MuonOfOwnRows(registry.get("runner", "ddp")):
    """Transforms the halves of a matrix separately."""

    def prepare(self, model, make_optimizer):
        super().prepare(model, make_optimizer)
        transform = self.optimizer.transform
        self.optimizer.transform = lambda matrix, state: torch.cat([transform(x, state) for x in matrix.chunk(2)])
