"""Interleave the samples of several sources so that every prefix is in proportion to the sources' shares.

The shares are quantized to integers; their sum is the period. A table lists the source of each sample in a period. The
table is built by Tijdeman's algorithm ("The chairman assignment problem", Discrete Mathematics 32, 1980), so that in
every prefix the count of each source differs from its share by less than one sample. The table gives the source of any
sample in constant time.
"""

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

LONGEST = 1 << 16  # period for shares that no shorter period represents exactly


def quantise(weights: Sequence[float], longest: int = LONGEST) -> list[int]:
    """Return positive integers in the proportions of `weights`, if their sum can be at most `longest`.

    Otherwise the integers add up to `longest`, and each differs from its share by less than one. Shares below 1 become
    1; the sum may then be above `longest`.
    """
    exact = [Fraction(str(weight)) for weight in weights]
    shares = [weight / sum(exact) for weight in exact]
    period = math.lcm(*(share.denominator for share in shares))
    if period <= longest:
        return [int(share * period) for share in shares]
    counts = [max(1, math.floor(share * longest)) for share in shares]
    lack = [share * longest - count for share, count in zip(shares, counts, strict=True)]
    for place in sorted(range(len(shares)), key=lambda k: -lack[k])[: max(0, longest - sum(counts))]:
        counts[place] += 1
    return counts


class MixtureOrder:
    """Maps samples to sources; `counts`, from `quantise`, holds each source's number of samples in a period."""

    def __init__(self, counts: Sequence[int]) -> None:
        self.counts, self.period = list(counts), sum(counts)
        self._turn = _turns(self.counts)
        self._before = np.zeros(self.period, np.int64)  # number of earlier turns of the same source in the period
        for k in range(len(self.counts)):
            mine = np.flatnonzero(self._turn == k)
            self._before[mine] = np.arange(len(mine))

    def place(self, n: int) -> tuple[int, int]:
        """Return (source of sample n, number of earlier samples from that source)."""
        periods, position = divmod(n, self.period)
        k = int(self._turn[position])
        return k, periods * self.counts[k] + int(self._before[position])


def _turns(counts: list[int]) -> np.ndarray:
    """Return the source of each turn, int64 [period].

    Among the sources that are far enough behind their shares, the source with the earliest deadline is next.
    """
    shares = np.array(counts, np.int64)
    period, number = int(shares.sum()), len(counts)
    turns = np.zeros(period, np.int64)
    if number == 1:
        return turns
    scale = 2 * number - 2
    had = np.zeros(number, np.int64)
    for step in range(1, period + 1):
        behind = scale * (shares * step - period * had)  # samples by which each source is behind, times period * scale
        left = np.where(behind >= period, (period * (scale - 1) - behind) / shares, np.inf)
        turns[step - 1] = chosen = int(np.argmin(left))
        had[chosen] += 1
    return turns
