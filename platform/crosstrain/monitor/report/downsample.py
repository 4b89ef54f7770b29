"""Downsampling and smoothing of long curves, so that the page stays small and looks the same.

A page with 5 curves of 1,000,000 steps takes 5 MB, nearly all of it plotly.js, instead of 126 MB.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, groupby
from typing import TypeVar

BUCKETS = 240  # about a bucket for two of the picture's columns

Place = TypeVar("Place", bound=float)


def downsample(steps: Sequence[Place], values: Sequence[float], buckets: int = BUCKETS) -> list[tuple[Place, float]]:
    """Return (step, value) of the lowest and the highest value in each of `buckets` ranges of steps, and of both ends.

    So spikes stay, however short they are. Steps, or whatever places values, must ascend.
    """
    if len(steps) <= 2 * buckets:
        return list(zip(steps, values, strict=True))
    first, span = steps[0], steps[-1] - steps[0] + 1
    kept = {0, len(steps) - 1}
    for _, group in groupby(range(len(steps)), key=lambda i: int((steps[i] - first) * buckets // span)):
        bucket = list(group)
        kept |= {min(bucket, key=values.__getitem__), max(bucket, key=values.__getitem__)}
    return [(steps[i], values[i]) for i in sorted(kept)]


def smooth(values: Sequence[float], reach: int) -> list[float]:
    """Return the mean of each value and up to `reach` values on either side of it, so that it does not lag."""
    sums = [0.0, *accumulate(values)]
    windows = ((max(0, i - reach), min(len(values), i + reach + 1)) for i in range(len(values)))
    return [(sums[high] - sums[low]) / (high - low) for low, high in windows]
