"""Warmup, stable, decay: a constant learning rate with a short cooldown at the end of the schedule."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from crosstrain import ConfigError, Fraction, OptionError, PositiveInt, registry

# Cooldown: fraction of it that is done -> s(n). The shapes and their names are those of Megatron-LM.
_SHAPES: dict[str, Callable[[float], float]] = {
    "linear": lambda x: 1 - x,
    "cosine": lambda x: 0.5 * (1 + math.cos(math.pi * x)),
    "minus_sqrt": lambda x: 1 - math.sqrt(x),
    "exponential": lambda x: 2 * 0.5**x - 1,
}


@registry.register_lr_scheduler("wsd")
class WarmupStableDecay:
    """Constant `init_lr` after the warmup, then a cooldown to `min_lr` in the last steps before `lr_decay_iters`.

    The stable phase does not depend on the length of the run (Hu et al., 2024; Haegele et al., 2024): any checkpoint of
    it can be resumed with a cooldown of its own.
    """

    @dataclass
    class Options:
        """The cooldown; one of the two lengths."""

        cooldown_fraction: Fraction | None = None  # length as a fraction of lr_decay_iters; without both lengths: 0.2
        cooldown_steps: PositiveInt | None = None  # length in steps
        shape: Literal["linear", "cosine", "minus_sqrt", "exponential"] = "minus_sqrt"  # of the cooldown, from 1 to 0

        def __post_init__(self) -> None:
            if self.cooldown_fraction is not None and self.cooldown_steps is not None:
                raise OptionError("cooldown_steps", "cooldown_fraction also sets the length of the cooldown; set one")

    def __init__(self, warmup_steps: float, decay_steps: int, options: Any) -> None:
        fraction = 0.2 if options.cooldown_fraction is None else options.cooldown_fraction
        self._length = options.cooldown_steps or fraction * decay_steps
        self._start = decay_steps - self._length
        self._shape = _SHAPES[options.shape]
        if self._start < warmup_steps:
            raise ConfigError(
                f"run.lr_sched: a warmup of {warmup_steps:g} steps and a cooldown of {self._length:g} exceed the "
                f"{decay_steps} steps of the schedule"
            )

    def __call__(self, applied: float) -> float:
        return self._shape(min((applied - self._start) / self._length, 1.0)) if applied > self._start else 1.0
