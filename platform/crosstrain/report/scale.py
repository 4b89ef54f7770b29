"""Axes: ranges, round marks on them, and numbers as people read them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


def show(value: float) -> str:
    """A number in few characters: 12.5k, 0.031, 1.5e-4."""
    size = abs(value)
    for unit, sign in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if unit <= size < 1e15:
            return f"{value / (1e3 if sign == 'k' else unit):.4g}{sign}"
    if size == 0 or 1e-3 <= size < 1e15:
        return f"{value:.4g}"
    mantissa, exponent = f"{value:.2e}".split("e")
    return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"


@dataclass(frozen=True)
class Axis:
    """From values to 0..1, linearly or by logarithms; what lies outside is moved to the edge."""

    low: float
    high: float
    logarithmic: bool = False

    def place(self, value: float) -> float:
        low, high = self.low, self.high
        if self.logarithmic:
            low, high, value = math.log(low), math.log(high), math.log(max(value, low))
        return min(max((value / 2 - low / 2) / (high / 2 - low / 2), 0.0), 1.0)  # halves: the span may overflow

    def marks(self, about: int = 5) -> list[float]:
        """Round values within."""
        if not self.logarithmic:
            return _round_marks(self.low, self.high, about)
        first, last = math.ceil(math.log10(self.low)), math.floor(math.log10(self.high))
        every = max(1, (last - first + 1) // about)
        decades = [10.0**e for e in range(first, last + 1, every)]
        if len(decades) >= 3:
            return decades
        found = [m * 10.0**e for e in range(first - 1, last + 1) for m in (1, 2, 5)]
        return [v for v in found if self.low <= v <= self.high]


def value_axis(values: Sequence[float]) -> tuple[Axis, bool]:
    """An axis for these, logarithmic where they span decades, and whether a few high ones are beyond its end."""
    ordered = sorted(values)
    low, high = ordered[0], ordered[-1]
    if low > 0 and high / low > 100:
        return Axis(low / 1.1, min(high * 1.1, 1e308), logarithmic=True), False
    near, far = ordered[len(ordered) // 50], ordered[-1 - len(ordered) // 50]
    limit = far + 3 * (far - near)
    cut = len(ordered) >= 50 and high > limit > low
    high = limit if cut else high
    margin = 0.06 * (high - low) or abs(high) * 0.1 or 1.0
    if not math.isfinite(margin):
        return Axis(low, high), False
    bottom = 0.0 if 0 <= low < 0.25 * high else low - margin
    return Axis(max(bottom, -1e308), min(high + margin, 1e308)), cut


def _round_marks(low: float, high: float, about: int) -> list[float]:
    raw = high / about - low / about
    if not (raw > 0 and math.isfinite(raw)):
        return [low]
    unit = 10.0 ** math.floor(math.log10(raw))
    if unit == 0 or not math.isfinite(unit):
        return [low]
    step = next((m * unit for m in (1, 2, 2.5, 5, 10) if m * unit >= raw), 10 * unit)
    first = math.ceil(low / step)
    return [v for i in range(about + 3) if (v := (first + i) * step) <= high]
