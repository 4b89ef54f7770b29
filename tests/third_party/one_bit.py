"""DDP with a fault: under `run.bitwise`, rank 1 flips one bit of one gradient in one micro batch."""

from dataclasses import replace

import torch
from crosstrain_plugins.builtin.runners.bitwise.ddp import BitwiseDDP

from crosstrain import registry

DDP = registry.get("runner", "ddp")
MICRO_BATCH = 8  # counted on the rank
PARAMETER = "transformer.h.1.mlp.c_fc.weight"


@registry.register_runner("one_bit")
class OneBit(DDP):
    capabilities = replace(DDP.capabilities, bitwise=f"{__name__}:Flipped")


class Flipped(BitwiseDDP, OneBit):
    micro_batches = 0

    def backward(self, loss: torch.Tensor) -> None:
        super().backward(loss)
        self.micro_batches += 1
        if self.world.rank == 1 and self.micro_batches == MICRO_BATCH:
            gradient = self.model.weights.parameters()[PARAMETER].grad
            assert gradient is not None
            # The sum of 12 micro batches rounds away up to four bits of its largest leaves, so flip the sixth.
            gradient.view(torch.int32).view(-1)[gradient.abs().argmax()] ^= 1 << 5
