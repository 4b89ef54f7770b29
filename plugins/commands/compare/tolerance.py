"""Differences between recorded runs, and the limits below which they count as rounding error."""

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Record = dict[str, Any]  # measurements of a contestant, written by its rank 0; see worker.py

_FACTOR = 16.0  # differences below 16 times the reference's noise are ignored
_FIRST_FACTOR = 8.0  # the same factor for step 1, where no earlier step has amplified differences


@dataclass(frozen=True)
class Gap:
    """Dot products of d and r: r is the reference's tensor, and d is the measured tensor minus r."""

    dd: float
    dr: float
    rr: float

    @property
    def relative(self) -> float:
        """|d| / |r|."""
        if not math.isfinite(self.dd) and not math.isfinite(self.rr):  # both tensors overflowed
            return 0.0
        if self.rr == 0.0 or not math.isfinite(self.dd):
            return 0.0 if self.dd == 0.0 else math.inf
        return math.sqrt(self.dd / self.rr)

    @property
    def ratio(self) -> float:
        """The factor k for which k * r is closest to the measured tensor."""
        return 1.0 + self.dr / self.rr if self.rr else math.inf

    @property
    def residual(self) -> float:
        """Relative distance of the measured tensor from `ratio` times r."""
        return math.sqrt(max(self.dd - self.dr**2 / self.rr, 0.0) / self.rr) if self.rr else math.inf


def difference(a: float | None, b: float | None) -> float:
    """Return the difference relative to `b`; None stands for a non-finite number, and equals only None."""
    if a is None or b is None:
        return 0.0 if a is b else math.inf
    return abs(a - b) / max(abs(b), 1e-30)


def number_difference(record: Record, reference: Record, key: str) -> float:
    """Return the largest relative difference in the metric `key` over the recorded steps."""
    theirs = {row["step"]: row for row in reference["rows"]}
    return max(difference(row[key], theirs[row["step"]][key]) for row in record["rows"])


def largest(step: Record) -> tuple[float, str]:
    """Return the largest gradient difference in a step, and the name of the parameter."""
    return max(
        ((Gap(*products).relative, name) for name, products in step["gradients"]["products"].items()),
        default=(0.0, ""),
    )


def steps_of(record: Record) -> dict[int, dict[str, Any]]:
    """Return a dict from each step to its record."""
    return {row["step"]: step for row, step in zip(record["rows"], record["steps"], strict=True)}


def relative(products: list[float]) -> float:
    """Return |d| / |r| for difference d and reference r, or |d| / |m| for a weight with update m.

    `products` is [dd, dr, rr], or [dd, dm, dw, mm, mw, ww] for a weight; w is the weight before the update.
    """
    return Gap(products[0], products[1], products[-1] if len(products) == 3 else products[3]).relative


def copies_apart(measured: Record, most: float) -> list[str]:
    """Return the parameters with copies that differ between ranks by more than `most`, largest difference first."""
    apart = measured["apart"]
    return sorted((name for name in apart if apart[name] > most), key=lambda name: -apart[name])


def usual_difference(mine: Record, theirs: Record) -> float:
    """Return the median difference of the modules' mean squares; 0 without modules."""
    found = [0.0]
    for module, means in mine.items():
        found += map(difference, means[:2], theirs[module][:2])
    return statistics.median(found)


def numbered(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers[:4])) + (", ..." if len(numbers) > 4 else "")


def listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more parameters"


def same_forward(record: Record, reference: Record) -> bool:
    """Return True if all modules in the first step are called as often, with equal mean squares of all values."""
    mine, theirs = record["steps"][0]["activations"], reference["steps"][0]["activations"]
    return mine.keys() == theirs.keys() and all(
        difference(a, b) <= 1e-12 for name in theirs for a, b in zip(mine[name], theirs[name], strict=True)
    )


@dataclass(frozen=True)
class Tolerance:
    """Largest differences that count as rounding error: multiples of the reference's noise, with a floor per precision.

    The noise is the difference between the reference and a second run with the micro batches in reverse order and
    the weights perturbed by up to one rounding error in each forward. docs/compare.md contains measurements. Limits are
    narrow for a run whose forward has the same bits as the reference's: then only fp32 sums can differ, and in place of
    the weights, the gradients are perturbed.
    """

    losses: float  # relative limit for losses
    norms: float  # relative limit for gradient norms
    floor: float  # lower bound on a tensor's limit, relative to the norm of its gradient or update
    shows: float  # a relative error of the weights that is large enough to change gradients
    noise: Record | None = None  # None: only the floors apply
    small: float = 1e-7  # gradients below this fraction of the global gradient norm are only rounding error
    weights: float = 2.0**-22  # relative rounding error of fp32 weights over a few steps
    least: float = 2e-6  # lower bound on relative limits for losses, gradient norms and mean squares of activations
    mixed: float = 1e-4  # a gradient that is a weighted sum of others differs by this much in the compute dtype
    is_narrow: bool = False

    @property
    def is_exact(self) -> bool:
        return self == EXACT

    @property
    def first_losses(self) -> float:
        """Relative limit for losses of the initial weights."""
        return self.least if self.is_narrow else self.losses

    @staticmethod
    def of(dtype: str, reference: Record, noise: Record | None, narrow: bool = False) -> "Tolerance":
        fp32 = dtype == "fp32" or narrow
        least, most, floor, shows = (2e-6, 1e-3, 1e-5, 1e-4) if fp32 else (2e-5, 2e-2, 2e-3, 0.5)
        found = {key: number_difference(noise, reference, key) if noise else 0.0 for key in ("loss", "grad_norm")}
        losses, norms = (max(least, min(_FACTOR * found[key], most)) for key in found)
        return Tolerance(
            losses, norms, floor, shows, noise, least=least, mixed=1e-4 if dtype == "fp32" else 2e-2, is_narrow=narrow
        )

    def random(self, reference: Record) -> bool:
        """Return True if the training loss minus router losses differs from the evaluation loss, as with dropout."""
        loss, added = reference["rows"][0]["loss"], reference["steps"][0]["routing"]["loss"]
        return difference(None if loss is None else loss - added, reference["plain_loss"]) > max(self.losses, 2e-6)

    def limits(self, step: int, group: str, kind: str | None = None) -> Callable[[str], float]:
        """Return a function from a tensor's name to its limit in a step: the largest relative difference allowed.

        The limit is a multiple of the tensor's own noise or of the group's median, whichever is larger, and at least
        `floor`.
        """
        recorded = {} if self.noise is None else steps_of(self.noise)[step].get(group, {})
        measured = (recorded.get(kind, {}) if kind else recorded).get("products", {})
        finite = {name: noise for name, p in measured.items() if math.isfinite(noise := relative(p))}
        median = statistics.median(finite.values()) if finite else 0.0
        factor = _FIRST_FACTOR if step == 1 else _FACTOR
        return lambda name: max(self.floor, factor * max(finite.get(name, 0.0), median))


EXACT = Tolerance(0.0, 0.0, 0.0, 0.0, None, 0.0, 0.0, 0.0)  # for `run.bitwise`: every difference is an error
