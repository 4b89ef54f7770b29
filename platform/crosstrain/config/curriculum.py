"""Short sequences first: the length of a step's samples as a function of the step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

from annotated_types import Interval

from crosstrain.config.bounds import PositiveInt
from crosstrain.config.schema import OptionError
from crosstrain.utils.errors import ConfigError


@dataclass
class CurriculumOptions:
    """From which length, for how many steps. The same under every runner, batch layout and after any resume."""

    start: PositiveInt  # tokens of a sample in the first steps
    steps: PositiveInt  # from this step on samples are whole
    multiple_of: PositiveInt = 8  # lengths are rounded down to it
    # 1: the length grows linearly; 2: with the square root of the step, and so on
    degree: Annotated[float, Interval(ge=1, le=100)] = 1.0

    def __post_init__(self) -> None:
        if self.start % self.multiple_of:
            raise OptionError("start", f"{self.start} is not a multiple of {self.multiple_of} (multiple_of)")

    def check(self, full: int | None) -> int:
        """The whole length, which the dataset says. ConfigError where there is none or it is below `start`."""
        if full is None:
            raise ConfigError("run.curriculum: the dataset's samples have no common length, so none can be scheduled")
        if self.start > full:
            raise ConfigError(f"run.curriculum.start: {self.start} is more than the dataset's seq_length, {full}")
        return full

    def length(self, step: int, full: int) -> int:
        """Tokens of a sample in a step, counted from 1.

        As `fixed_linear` and `fixed_root` of DeepSpeed's curriculum_scheduler.py, at whose end samples are whole.
        """
        if step >= self.steps:
            return full
        grown = math.floor((step / self.steps) ** (1 / self.degree) * (full - self.start) + self.start)
        return min(max(grown - grown % self.multiple_of, self.start), full)
