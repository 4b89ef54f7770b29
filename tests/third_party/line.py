"""A model that is no language model: a line through noisy points."""

from dataclasses import dataclass

import numpy as np
from torch import nn

from crosstrain import Dataset, Model, registry


@registry.register_dataset("points")
class Points(Dataset):
    """Points [2] around a line."""

    @dataclass
    class Options:
        count: int = 40

    def __len__(self):
        return self.options.count

    def get(self, index, rng):
        own = np.random.default_rng([index, self.split == "train"])
        point = own.normal(size=2).astype(np.float32)
        return {"points": point, "labels": (point.sum(keepdims=True) + own.normal(0, 0.1, 1)).astype(np.float32)}


@registry.register_model("line")
class Line(Model):
    """Least squares, which records the share of guesses that are too high."""

    def __init__(self, options):
        super().__init__(options)
        self.layer = nn.Linear(2, 1)

    def forward(self, points, labels=None, cache=None):
        guess = self.layer(points)
        if labels is None:
            return guess.float()
        self.record("too_high", (guess > labels).float())
        return (guess - labels).float().square().sum()

    @staticmethod
    def num_targets(batch):
        return len(batch["labels"])

    def blocks(self):
        return []
