"""Whether Muon splits a fused matrix of queries, keys and values depends on the number of rows in a rank's shard.

https://github.com/NVIDIA/Megatron-LM/pull/7117
"""

import torch

from crosstrain import registry

from . import Expected

EXPECTED = Expected(
    "update", cause=r"optimizer|orthogonal", parameter="transformer.h.*.attn.c_attn.weight", project="muon"
)


@registry.register_runner("muon_splits_fused")
class MuonSplitsFused(registry.get("runner", "ddp")):
    """Transforms queries, keys and values separately."""

    def prepare(self, model, make_optimizer):
        super().prepare(model, make_optimizer)
        transform = self.optimizer.transform

        def split(matrix, state):
            rows, columns = matrix.shape
            parts = matrix.chunk(3, 1) if columns == 3 * rows else [matrix]
            return torch.cat([transform(part, state) for part in parts], 1)

        self.optimizer.transform = split
