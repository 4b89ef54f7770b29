"""Batch arithmetic: global batch = micro batch x accumulation x data-parallel ranks."""

import math
from dataclasses import dataclass, replace
from typing import ClassVar

from crosstrain.config.bounds import PositiveInt
from crosstrain.config.run_options import BatchWarmupOptions, RunOptions
from crosstrain.utils.errors import ConfigError


@dataclass(kw_only=True)
class RolloutOptions:
    """Options of objectives that sample completions while they train.

    A subclass may have other defaults, and may make the class variables options: fields with the same names.
    """

    completions: PositiveInt = 8  # completions per prompt
    max_new_tokens: PositiveInt = 256  # limit of the tokens of a turn
    turns: ClassVar[int] = 1  # maximum number of turns that are sampled for a completion
    updates_per_rollout: ClassVar[int] = 1  # number of consecutive optimizer steps that learn from the same completions


@dataclass(frozen=True)
class BatchPlan:
    """Batch sizes in samples: global_batch = micro_batch x accumulation x dp_size."""

    global_batch: int
    micro_batch: int
    accumulation: int
    dp_size: int
    warmup: BatchWarmupOptions | None = None  # before its end, steps have fewer samples, and less accumulation
    uses: int = 1  # number of consecutive steps with the same samples

    @classmethod
    def of(cls, run: RunOptions, dp_size: int) -> "BatchPlan":
        """Return `sizes_of` with the batch size's warmup and `uses`. Raises ConfigError for sizes that do not fit."""
        plan, options = cls.sizes_of(run, dp_size), run.objective and run.objective.options
        if isinstance(options, RolloutOptions):
            plan = replace(plan, uses=options.updates_per_rollout)
        if run.batch_warmup is None:
            return plan
        for size in run.batch_warmup.sizes(plan.global_batch):
            if size % (plan.micro_batch * dp_size):
                raise ConfigError(
                    f"run.batch_warmup: a step of {size} samples is not a multiple of {plan.micro_batch * dp_size} "
                    f"({plan.micro_batch} micro_batch_size x {dp_size} data-parallel ranks); set run.micro_batch_size"
                )
        return replace(plan, warmup=run.batch_warmup)

    @classmethod
    def sizes_of(cls, run: RunOptions, dp_size: int) -> "BatchPlan":
        """Compute the batch plan for `dp_size` data-parallel ranks. Omitted sizes are derived, or default to 1.

        Raises ConfigError for inconsistent sizes, with the nearest valid global batch size.
        """
        total, micro, accumulation = run.global_batch_size, run.micro_batch_size, run.accum_grad_iters
        unit = (micro or 1) * (accumulation or 1) * dp_size
        if total is None:
            return cls(unit, micro or 1, accumulation or 1, dp_size)
        if micro is None and accumulation is None:
            accumulation = 1
        factors = {"micro_batch_size": micro, "accum_grad_iters": accumulation, "data-parallel ranks": dp_size}
        exact = micro is not None and accumulation is not None
        if total != unit if exact else total % unit:
            below = total // unit * unit
            nearest = unit if exact else below if below and total - below <= unit / 2 else below + unit
            product = " x ".join(f"{value} {name}" for name, value in factors.items() if value is not None)
            own = total // dp_size if total % dp_size == 0 and accumulation is None else 0
            fits = max((n for n in range(1, (micro or 1) + 1) if own and own % n == 0), default=None)
            raise ConfigError(
                f"run.global_batch_size: {total} is not {'' if exact else 'a multiple of '}{unit} ({product}); "
                f"the nearest valid global_batch_size is {nearest}"
                + (f", or micro_batch_size={fits} keeps {total}" if fits else "")
            )
        return cls(total, micro or total // unit, accumulation or total // unit, dp_size)

    def size(self, before: int) -> int:
        """Return the number of samples in a step after `before` samples."""
        return self.global_batch if self.warmup is None else self.warmup.size(before, self.global_batch)

    def steps(self, run: RunOptions, samples: int) -> int:
        """Return the number of steps of the whole run, for a training split of `samples` samples.

        An epoch takes each sample once, and trains on it in `uses` steps.
        """
        if run.max_iters is not None:
            return run.max_iters
        assert run.max_epoch is not None  # exactly one of the two is set
        total, before, count = run.max_epoch * samples, 0, 0
        while before < total and (size := self.size(before)) < self.global_batch:
            before, count = before + size, count + 1
        return self.uses * (count + math.ceil(max(total - before, 0) / self.global_batch))
