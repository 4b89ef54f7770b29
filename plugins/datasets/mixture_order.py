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
    """Return positive integers in the proportions of `weights`, if their sum can be at most 65,536.

    Otherwise the integers add up to 65,536, and each differs from its share by less than one. Shares below 1 become
    1; the sum may then be above 65,536.
    """
    exact = [Fraction(str(weight)) for weight in weights]
    shares = [weight / sum(exact) for weight in exact]
    period = math.lcm(*(share.denominator for share in shares))
    if period <= _LONGEST:
        return [int(share * period) for share in shares]
    counts = [max(1, math.floor(share * _LONGEST)) for share in shares]
    lack = [share * _LONGEST - count for share, count in zip(shares, counts, strict=True)]
    for place in sorted(range(len(shares)), key=lambda k: -lack[k])[: max(0, _LONGEST - sum(counts))]:
        counts[place] += 1
    return counts


class MixtureOrder:
    """Maps samples to sources; `counts`, from `quantise`, holds each source's number of samples in a period."""

    def __init__(self, counts: Sequence[int]) -> None:
        self.counts, self.period = list(counts), sum(counts)
        self._turn, self._before = _turns(self.counts)

    def place(self, n: int) -> tuple[int, int]:
        """Return (source of sample n, number of earlier samples from that source)."""
        periods, position = divmod(n, self.period)
        k = int(self._turn[position])
        return k, periods * self.counts[k] + int(self._before[position])

    def counts_before(self, n: int) -> np.ndarray:
        """Return the number of samples that each source has among the first n."""
        periods, position = divmod(n, self.period)
        return periods * np.array(self.counts) + np.bincount(self._turn[:position], minlength=len(self.counts))


class StagedOrder:
    """An order whose shares change. Each source goes on where it was, so its own order is that of one stage.

    stages: first sample of each stage -> weights of the sources; 0 leaves a source out.
    """

    def __init__(self, stages: dict[int, Sequence[float]]) -> None:
        self._starts, self._stages = sorted(stages), list[tuple[list[int], MixtureOrder, np.ndarray]]()
        had = np.zeros(len(stages[0]), np.int64)
        for start, stop in pairwise([*self._starts, self._starts[-1]]):
            used = [k for k, weight in enumerate(stages[start]) if weight]
            order = MixtureOrder(quantise([stages[start][k] for k in used]))
            self._stages.append((used, order, had.copy()))
            had[used] += order.counts_before(stop - start)

    def place(self, n: int) -> tuple[int, int]:
        """Return (source of sample n, number of earlier samples from that source)."""
        stage = bisect_right(self._starts, n) - 1
        used, order, had = self._stages[stage]
        k, earlier = order.place(n - self._starts[stage])
        return used[k], int(had[used[k]]) + earlier


def _turns(counts: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Return the source of each turn, and its number of earlier turns in the period, both int64 [period].

    Among the sources that are far enough behind their shares, the source with the earliest deadline is next.
    """
    shares = np.array(counts, np.int64)
    period, number = int(shares.sum()), len(counts)
    turns, before = np.zeros(period, np.int64), np.zeros(period, np.int64)
    scale = 2 * number - 2
    had = np.zeros(number, np.int64)
    for step in range(1, period + 1):
        behind = scale * (shares * step - period * had)  # samples by which each source is behind, times period * scale
        left = np.where(behind >= period, (period * (scale - 1) - behind) / shares, np.inf)
        turns[step - 1] = chosen = int(np.argmin(left))
        before[step - 1] = had[chosen]
        had[chosen] += 1
    return turns, before
