"""Differences of recorded trainings, and those of them that are rounding."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Record = dict[str, Any]  # of a contestant, by its rank 0; see worker.py

_FACTOR = 16.0  # by which a difference exceeds the reference's own noise before it is one
_FIRST_FACTOR = 8.0  # the same in step 1, before steps have amplified anything


@dataclass(frozen=True)
class Gap:
    """Products of d and r, where d is the difference of a tensor here and the reference's r."""

    dd: float
    dr: float
    rr: float

    @property
    def relative(self) -> float:
        """|d| / |r|."""
        if not math.isfinite(self.dd) and not math.isfinite(self.rr):  # an overflow on both sides
            return 0.0
        if self.rr == 0.0 or not math.isfinite(self.dd):
            return 0.0 if self.dd == 0.0 else math.inf
        return math.sqrt(self.dd / self.rr)

    @property
    def ratio(self) -> float:
        """The factor on r that is nearest to the tensor here."""
        return 1.0 + self.dr / self.rr if self.rr else math.inf

    @property
    def residual(self) -> float:
        """Relative distance from the reference's tensor times `ratio`."""
        return math.sqrt(max(self.dd - self.dr**2 / self.rr, 0.0) / self.rr) if self.rr else math.inf


def difference(a: float | None, b: float | None) -> float:
    """Relative to `b`; None, a number that is not finite, equals only itself."""
    if a is None or b is None:
        return 0.0 if a is b else math.inf
    return abs(a - b) / max(abs(b), 1e-30)


def number_difference(record: Record, reference: Record, key: str) -> float:
    """The largest difference of a number over the steps that both have."""
    theirs = {row["step"]: row for row in reference["rows"]}
    return max(difference(row[key], theirs[row["step"]][key]) for row in record["rows"])


def largest(step: Record) -> tuple[float, str]:
    """The largest gradient difference of a step, and its parameter."""
    gradients = step["gradients"]["products"]
    return max(((Gap(*products).relative, name) for name, products in gradients.items()), default=(0.0, ""))


def steps_of(record: Record) -> dict[int, dict[str, Any]]:
    """The records of the steps, by their numbers."""
    return {row["step"]: step for row, step in zip(record["rows"], record["steps"], strict=True)}


def relative(products: list[float]) -> float:
    """|d| relative to the reference: to its tensor, [dd, dr, rr], or to a weight's way in a step, [dd, dm, .., mm, ..].

    The latter are the products of d, the way m and the weight w before it with each other.
    """
    return Gap(products[0], products[1], products[-1] if len(products) == 3 else products[3]).relative


@dataclass(frozen=True)
class Tolerance:
    """Largest differences that are rounding: multiples of the reference's noise, with a floor for each precision.

    The noise is the difference of the reference from itself with its micro batches in reverse order, and its weights
    rounded otherwise in each forward. docs/compare.md has measurements.
    """

    numbers: float  # of losses and gradient norms, relative
    floor: float  # of a tensor's gradient, relative to its norm
    shows: float  # relative error of all weights that gradients certainly show
    noise: Record | None = None

    @staticmethod
    def of(dtype: str, reference: Record, noise: Record | None) -> Tolerance:
        least, most, floor, shows = (2e-6, 1e-3, 1e-5, 1e-4) if dtype == "fp32" else (2e-5, 2e-2, 2e-3, 0.5)
        found = 0.0 if noise is None else max(number_difference(noise, reference, k) for k in ("loss", "grad_norm"))
        return Tolerance(max(least, min(_FACTOR * found, most)), floor, shows, noise)

    def random(self, reference: Record) -> bool:
        """True if a loss differs between training and evaluation by more than routers add, as by dropout."""
        loss, added = reference["rows"][0]["loss"], reference["steps"][0]["routing"]["loss"]
        return difference(None if loss is None else loss - added, reference["plain_loss"]) > self.numbers

    def limits(self, step: int, group: str, kind: str | None = None) -> Callable[[str], float]:
        """The largest difference that is rounding, by tensor of a group in or after a step.

        It is a multiple of the tensor's own noise, or of the group's median.
        """
        recorded = {} if self.noise is None else steps_of(self.noise)[step].get(group, {})
        measured = (recorded.get(kind, {}) if kind else recorded).get("products", {})
        found = {name: relative(products) for name, products in measured.items()}
        finite = {name: noise for name, noise in found.items() if math.isfinite(noise)}
        median = statistics.median(finite.values()) if finite else 0.0
        factor = _FIRST_FACTOR if step == 1 else _FACTOR
        return lambda name: max(self.floor, factor * max(finite.get(name, 0.0), median))
