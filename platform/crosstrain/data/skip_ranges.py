"""Ranges of sample numbers that a run skips. The order of the other samples does not change."""

from collections.abc import Iterator, Sequence
from itertools import count

Ranges = list[list[int]]  # [first, last] of each range, ascending, without overlap


def numbers(start: int, left_out: Ranges) -> Iterator[int]:
    """Yield the sample numbers `start`, `start` + 1, ... endlessly, except those in the ranges."""
    for first, last in left_out:
        if last >= start:
            yield from range(start, first)
            start = last + 1
    yield from count(start)


def leave_out(left_out: Ranges, more: Sequence[int]) -> Ranges:
    """Return the ranges with the sample numbers `more` added."""
    out: Ranges = []
    for first, last in sorted([*left_out, *([number, number] for number in more)]):
        if out and first <= out[-1][1] + 1:
            out[-1][1] = max(out[-1][1], last)
        else:
            out.append([first, last])
    return out


def show(values: Sequence[int]) -> str:
    """Format sample numbers: `sample 7`, `samples 8 to 15`, `samples 8 to 11 and 16 to 19`."""
    found = [str(first) if first == last else f"{first} to {last}" for first, last in leave_out([], values)]
    return ("sample " if len(values) == 1 else "samples ") + " and ".join(found)
