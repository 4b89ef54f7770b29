"""GPT-2 with a parameter that some micro batches do not use."""

from dataclasses import dataclass

import torch
from torch import nn

from crosstrain import Around, registry

GPT2 = registry.get("model", "gpt2")


class Weights(Around):
    def initialize(self, name, value, rng):
        value.fill_(1.0) if name == "extra" else self.inner.initialize(name, value, rng)


@registry.register_model("partly_used")
class PartlyUsed(GPT2):
    @dataclass
    class Options(GPT2.Options):
        period: int = 1  # micro batches in a row that use it, before as many that do not

    def __init__(self, options):
        super().__init__(options)
        self.extra = nn.Parameter(torch.empty(7))
        self.calls = 0
        self.weights = Weights(self.weights)

    def forward(self, input_ids, labels=None, cache=None):
        loss = super().forward(input_ids, labels, cache)
        if labels is None or not self.training:
            return loss
        self.calls += 1
        used = (self.calls - 1) // self.options.period % 2 == 0
        return loss + labels.numel() * self.extra.square().sum() if used else loss
