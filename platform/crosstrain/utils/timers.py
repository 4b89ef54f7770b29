"""Timers for the phases of a step."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Timers:
    """Accumulates the seconds spent in named phases since the last `reset`.

    GPU work is asynchronous, so the time of a phase is correct only if `synchronize` is set. The trainer sets
    `synchronize` only for steps that are logged, because waiting for the GPU prevents overlap.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.synchronize = False
        self._reset_at = 0.0

    @property
    def since_reset(self) -> float:
        """Seconds since the last `reset`."""
        return self._now() - self._reset_at

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        started = self._now()
        try:
            yield
        finally:
            self.add(phase, self._now() - started)

    def add(self, phase: str, seconds: float) -> None:
        self.seconds[phase] = self.seconds.get(phase, 0.0) + seconds

    def reset(self, synchronize: bool) -> None:
        self.seconds.clear()
        self.synchronize = synchronize and torch.cuda.is_available()
        self._reset_at = self._now()

    def _now(self) -> float:
        if self.synchronize:
            torch.cuda.synchronize()
        return time.perf_counter()
