"""Long curves in few points, so that a page of a hundred thousand steps stays small and looks the same."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import TypeVar

BUCKETS = 240  # about a bucket for two of the picture's columns

Points = list[tuple[int, float]]
Place = TypeVar("Place", bound=float)


def thin(steps: Sequence[Place], values: Sequence[float], buckets: int = BUCKETS) -> list[tuple[Place, float]]:
    """(step, value) of the lowest and the highest value of each of `buckets` ranges of steps, and of both ends.

    What sticks out is kept, however short it is. Steps, or whatever places values, must ascend.
    """
    if len(steps) <= 2 * buckets:
        return list(zip(steps, values, strict=True))
    first, span = steps[0], steps[-1] - steps[0] + 1
    kept = {0, len(steps) - 1}
    low = high = 0
    bucket = 0
    for i, (step, value) in enumerate(zip(steps, values, strict=True)):
        if (here := int((step - first) * buckets // span)) != bucket:
            kept |= {low, high}
            bucket, low, high = here, i, i
        elif value < values[low]:
            low = i
        elif value > values[high]:
            high = i
    return [(steps[i], values[i]) for i in sorted(kept | {low, high})]


def smooth(values: Sequence[float], reach: int) -> list[float]:
    """The mean of each value and of up to `reach` on either side of it, which does not lag behind."""
    sums = [0.0, *accumulate(values)]
    out = []
    for i in range(len(values)):
        low, high = max(0, i - reach), min(len(values), i + reach + 1)
        out.append((sums[high] - sums[low]) / (high - low))
    return out
