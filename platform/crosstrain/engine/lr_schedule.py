"""Learning-rate schedules: linear warmup, then a registered decay."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from crosstrain.config.load import Config
from crosstrain.config.registry import registry
from crosstrain.utils.errors import ConfigError


@dataclass
class Schedule:
    """The learning rate as a function of applied steps.

    `rate(n)` is the rate of the n-th applied step (n = 1, 2, ...); a skipped step does not advance it. `shape(n)` is
    a registered schedule's function of n with values in [0, 1] between `min_lr` and `init_lr` after the warmup.
    """

    init_lr: float
    min_lr: float
    warmup_steps: float
    shape: Callable[[float], float]

    def rate(self, applied: int) -> float:
        if applied <= self.warmup_steps and self.warmup_steps > 0:
            return self.init_lr * applied / self.warmup_steps
        return self.min_lr + (self.init_lr - self.min_lr) * self.shape(applied)


def make_schedule(config: Config, max_iters: int) -> Schedule:
    """The configured schedule; `lr_decay_iters` and the warmup's length default to the run's."""
    run = config.run
    decay = run.lr_decay_iters or max_iters
    warmup = run.warmup_steps if run.warmup_steps is not None else (run.warmup_fraction or 0.0) * decay
    if warmup >= decay:
        raise ConfigError(f"run.warmup_steps: the warmup of {warmup:g} steps must be shorter than the decay of {decay}")
    make = registry.get("lr_scheduler", config.lr_sched.name)
    shape = make(warmup_steps=warmup, decay_steps=decay, options=config.lr_sched.options)
    return Schedule(run.init_lr, run.min_lr, warmup, shape)


def cosine(progress: float) -> float:
    """Half a cosine from 1 at progress 0 to 0 at progress 1, and 0 beyond."""
    return 0.5 * (1 + math.cos(math.pi * min(max(progress, 0.0), 1.0)))
