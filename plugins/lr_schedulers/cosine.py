"""Cosine decay in two versions: the angle is pi*(n-w)/(D-w), or pi*(n-w)/D as in Megatron-LM's first release."""

import math
from collections.abc import Callable
from typing import Any

from crosstrain import registry


@registry.register_lr_scheduler("cosine")
def cosine(warmup_steps: float, decay_steps: int, options: Any) -> Callable[[float], float]:
    """Cosine decay with angle pi*(n-w)/(D-w) at step n, from `init_lr` at the warmup's end w to `min_lr` at step D."""
    return lambda applied: _half_cosine((applied - warmup_steps) / max(decay_steps - warmup_steps, 1))


@registry.register_lr_scheduler("cosine_megatron_v1")
def cosine_megatron_v1(warmup_steps: float, decay_steps: int, options: Any) -> Callable[[float], float]:
    """Cosine decay with angle pi*(n-w)/D, as in Megatron-LM's first release; it ends above `min_lr` unless w is 0."""
    return lambda applied: _half_cosine((applied - warmup_steps) / decay_steps)


def _half_cosine(progress: float) -> float:
    """Return a half cosine: 1 at progress 0, and 0 at progress 1 and above."""
    return 0.5 * (1 + math.cos(math.pi * min(max(progress, 0.0), 1.0)))
