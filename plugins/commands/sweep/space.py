"""What a sweep searches: options with a range or with choices, as `--search` gives them."""

import re
from dataclasses import dataclass
from typing import Any

import yaml

from crosstrain import UserError

_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
_RANGE = re.compile(rf"({_NUMBER})\.\.({_NUMBER})(:log)?")


@dataclass(frozen=True)
class Range:
    """Numbers from `low` to `high`, both included; whole numbers if both are."""

    low: float | int
    high: float | int
    log: bool  # every factor is equally likely, not every difference

    def draw(self, trial: Any, key: str) -> str:
        if isinstance(self.low, int):
            return str(trial.suggest_int(key, self.low, self.high, log=self.log))
        return f"{trial.suggest_float(key, self.low, self.high, log=self.log):.4g}"

    @property
    def ends(self) -> tuple[str, ...]:
        return str(self.low), str(self.high)


@dataclass(frozen=True)
class Choices:
    """Some values, as they would be written after `KEY=`."""

    values: tuple[str, ...]

    def draw(self, trial: Any, key: str) -> str:
        return str(trial.suggest_categorical(key, self.values))

    @property
    def ends(self) -> tuple[str, ...]:
        return self.values


Space = dict[str, Range | Choices]


def read_space(given: list[str]) -> Space:
    """Read arguments such as run.init_lr=1e-4..1e-2:log and model.dropout=0,0.1. Raises UserError for mistakes."""
    space: Space = {}
    for text in given:
        key, _, values = text.partition("=")
        if not (key and values) or key in space:
            raise UserError(f"--search: {text!r} is not a new KEY=LOW..HIGH[:log] or KEY=VALUE,VALUE")
        space[key] = _range(text, *found.groups()) if (found := _RANGE.fullmatch(values)) else _choices(text, values)
    return space


def _range(text: str, first: str, last: str, log: str | None) -> Range:
    whole = first.lstrip("+-").isdecimal() and last.lstrip("+-").isdecimal()
    low, high = (int(first), int(last)) if whole else (float(first), float(last))
    if low >= high or (log and low <= 0):
        raise UserError(f"--search: {text}: the first number must be lower{' and above 0' if log else ''}")
    return Range(low, high, bool(log))


def _choices(text: str, values: str) -> Choices:
    """Split at commas outside of brackets and quotes, as YAML does."""
    try:
        parsed = yaml.compose(f"[{values}]")
    except yaml.YAMLError:
        parsed = None
    if not isinstance(parsed, yaml.SequenceNode) or len(parsed.value) < 2:
        raise UserError(f"--search: {text!r} is neither KEY=LOW..HIGH[:log] nor KEY=VALUE,VALUE")
    return Choices(tuple(f"[{values}]"[n.start_mark.index : n.end_mark.index].strip() for n in parsed.value))
