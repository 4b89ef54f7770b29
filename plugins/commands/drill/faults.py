"""Faults of a worker process on this machine."""

import os
import signal
import time
from collections.abc import Callable

_SLOW = 5.0  # seconds for which a worker is slow
_TURN = 0.2  # seconds of standing and of running, in turns


def kill(worker: int) -> None:
    os.kill(worker, signal.SIGKILL)


def freeze(worker: int) -> None:
    """Stop the process; the launcher kills it when the other workers miss it."""
    os.kill(worker, signal.SIGSTOP)


def slow(worker: int) -> None:
    """Let the process run for only half of the time."""
    for _ in range(int(_SLOW / _TURN / 2)):
        for number in (signal.SIGSTOP, signal.SIGCONT):
            os.kill(worker, number)
            time.sleep(_TURN)


def close(worker: int) -> None:
    """Ask the process to end, as an operator or a scheduler does by mistake."""
    os.kill(worker, signal.SIGTERM)


FAULTS: dict[str, Callable[[int], None]] = {"kill": kill, "freeze": freeze, "slow": slow, "close": close}
