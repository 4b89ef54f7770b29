"""Sample numbers that a run leaves out: its order of samples goes on as if they were not there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

Ranges = list[list[int]]  # [first, last] of each run of numbers, ascending, without overlap


def numbers(start: int, left_out: Ranges) -> Iterator[int]:
    """All sample numbers from `start` on, ascending and without end, but those that are left out."""
    for first, last in left_out:
        if last >= start:
            yield from range(start, first)
            start = last + 1
    while True:
        yield start
        start += 1


def take(start: int, count: int, left_out: Ranges) -> list[int]:
    """The next `count` sample numbers of a run that stands at `start`."""
    return list(islice(numbers(start, left_out), count))


def leave_out(left_out: Ranges, more: Sequence[int]) -> Ranges:
    """The ranges, with `more` numbers among them."""
    out: Ranges = []
    for first, last in sorted([*left_out, *spans(more)]):
        if out and first <= out[-1][1] + 1:
            out[-1][1] = max(out[-1][1], last)
        else:
            out.append([first, last])
    return out


def spans(values: Sequence[int]) -> Ranges:
    """Ascending numbers as ranges."""
    out: Ranges = []
    for value in values:
        if out and value == out[-1][1] + 1:
            out[-1][1] = value
        else:
            out.append([value, value])
    return out


def show(values: Sequence[int]) -> str:
    """`sample 7`, `samples 8 to 15`, `samples 8 to 11 and 16 to 19`."""
    found = [str(first) if first == last else f"{first} to {last}" for first, last in spans(values)]
    return ("sample " if len(values) == 1 else "samples ") + " and ".join(found)
