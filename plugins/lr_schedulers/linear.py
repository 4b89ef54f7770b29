"""Linear decay and a constant learning rate."""

from collections.abc import Callable
from typing import Any

from crosstrain import registry


@registry.register_lr_scheduler("linear")
def linear(warmup_steps: float, decay_steps: int, options: Any) -> Callable[[float], float]:
    """Linear decay from `init_lr` at the warmup's end to `min_lr` at step D (`lr_decay_iters`)."""
    return lambda applied: 1 - min(max((applied - warmup_steps) / max(decay_steps - warmup_steps, 1), 0), 1)


@registry.register_lr_scheduler("constant")
def constant(warmup_steps: float, decay_steps: int, options: Any) -> Callable[[float], float]:
    """Constant `init_lr` after the warmup."""
    return lambda applied: 1.0
