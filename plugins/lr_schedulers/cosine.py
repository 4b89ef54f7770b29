"""Cosine decay, in two versions that differ in the angle's denominator."""

from __future__ import annotations

import math
from typing import Any

from crosstrain import registry


@registry.register_lr_scheduler("cosine")
class Cosine:
    """Angle pi*(n-w)/(D-w): from `init_lr` at the warmup's end w to `min_lr` at step D."""

    def __init__(self, warmup_steps: float, decay_steps: int, options: Any) -> None:
        self.warmup_steps, self.decay_steps = warmup_steps, decay_steps

    def __call__(self, applied: float) -> float:
        return cosine((applied - self.warmup_steps) / max(self.decay_steps - self.warmup_steps, 1))


@registry.register_lr_scheduler("cosine_megatron_v1")
class CosineMegatronV1(Cosine):
    """Angle pi*(n-w)/D, as in Megatron-LM's first release: above `min_lr` at step D unless w is 0."""

    def __call__(self, applied: float) -> float:
        return cosine((applied - self.warmup_steps) / self.decay_steps)


def cosine(progress: float) -> float:
    """Half a cosine from 1 at progress 0 to 0 at progress 1, and 0 beyond."""
    return 0.5 * (1 + math.cos(math.pi * min(max(progress, 0.0), 1.0)))
