"""Interleave the samples of several sources so that every prefix is in proportion to the sources' shares.

Shares may change at given samples.

The shares are quantized to integers; their sum is the period. A table lists the source of each sample in a period. The
table is built by Tijdeman's algorithm ("The chairman assignment problem", Discrete Mathematics 32, 1980), so that in
every prefix the count of each source differs from its share by less than one sample. The table gives the source of any
sample in constant time.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise

import numpy as np

_LONGEST = 1 << 16  # period for shares that no shorter period represents exactly


def quantise(weights: Sequence[float]) -> list[int]:
    """Return integers in the proportions of `weights`, if their sum can be at most 65,536.

    Otherwise the integers add up to 65,536, and each differs from its share by less than one. Shares between 0 and 1
    become 1; the sum may then be above 65,536.
    """
    exact = [Fraction(str(weight)) for weight in weights]
    shares = [weight / sum(exact) for weight in exact]
    period = math.lcm(*(share.denominator for share in shares))
    if period <= _LONGEST:
        return [int(share * period) for share in shares]
    counts = [max(1, math.floor(share * _LONGEST)) if share else 0 for share in shares]
    lack = [share * _LONGEST - count for share, count in zip(shares, counts, strict=True)]
    for place in sorted(range(len(shares)), key=lambda k: -lack[k])[: max(0, _LONGEST - sum(counts))]:
        counts[place] += 1
    return counts


class StagedOrder:
    """Maps samples to sources. Each source goes on where it was when the shares change.

    stages: first sample of each stage -> weights of the sources; 0 leaves a source out.
    """

    def __init__(self, stages: dict[int, Sequence[float]]) -> None:
        self._starts = sorted(stages)
        # per stage: each source's number of samples in a period, the two tables of a period, and the number of samples
        # that each source had before the stage
        self._stages = list[tuple[list[int], np.ndarray, np.ndarray, np.ndarray]]()
        had = np.zeros(len(stages[0]), np.int64)
        for start, stop in pairwise([*self._starts, self._starts[-1]]):
            counts = quantise(stages[start])
            turns, before = _turns(counts)
            self._stages.append((counts, turns, before, had.copy()))
            periods, position = divmod(stop - start, len(turns))
            had += periods * np.array(counts) + np.bincount(turns[:position], minlength=len(counts))

    def place(self, n: int) -> tuple[int, int]:
        """Return (source of sample n, number of earlier samples from that source)."""
        stage = bisect_right(self._starts, n) - 1
        counts, turns, before, had = self._stages[stage]
        periods, position = divmod(n - self._starts[stage], len(turns))
        k = int(turns[position])
        return k, int(had[k]) + periods * counts[k] + int(before[position])


def _turns(counts: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Return the source of each turn, and its number of earlier turns in the period, both int64 [period].

    Among the sources that are far enough behind their shares, the source with the earliest deadline is next. A source
    with the share 0 is never behind.
    """
    shares = np.array(counts, np.int64)
    period, number = int(shares.sum()), np.count_nonzero(shares)
    turns, before = np.zeros(period, np.int64), np.zeros(period, np.int64)
    scale = max(2 * number - 2, 1)
    had = np.zeros(len(counts), np.int64)
    for step in range(1, period + 1):
        behind = scale * (shares * step - period * had)  # samples by which each source is behind, times period * scale
        left = np.where(behind >= period, (period * (scale - 1) - behind) / np.maximum(shares, 1), np.inf)
        turns[step - 1] = chosen = int(np.argmin(left))
        before[step - 1] = had[chosen]
        had[chosen] += 1
    return turns, before
