"""Linear decay and a constant rate."""

from __future__ import annotations

from typing import Any

from crosstrain import registry


@registry.register_lr_scheduler("linear")
class Linear:
    """A straight line from `init_lr` at the warmup's end to `min_lr` at step D."""

    def __init__(self, warmup_steps: float, decay_steps: int, options: Any) -> None:
        self.warmup_steps, self.decay_steps = warmup_steps, decay_steps

    def __call__(self, applied: float) -> float:
        progress = (applied - self.warmup_steps) / max(self.decay_steps - self.warmup_steps, 1)
        return 1.0 - min(max(progress, 0.0), 1.0)


@registry.register_lr_scheduler("constant")
class Constant:
    """`init_lr` after the warmup."""

    def __init__(self, warmup_steps: float, decay_steps: int, options: Any) -> None:
        pass

    def __call__(self, applied: float) -> float:
        return 1.0
