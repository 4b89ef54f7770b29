"""Processes that are spawned: they do not outlive their parent, and need not run the main script again."""

import ctypes
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType


@contextmanager
def main_hidden() -> Iterator[None]:
    """Hide the main module, which may run on import, from processes that are spawned in the block."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")  # without a file
    try:
        yield
    finally:
        sys.modules["__main__"] = main


class Bond:
    """Something to pickle for a spawned process: once it is read, the system ends that process with this one."""

    def __reduce__(self) -> tuple:
        return on_parents_death, (signal.SIGKILL, os.getpid())


def on_parents_death(number: signal.Signals, parent: int | None = None) -> None:
    """Have the system send this process a signal when its parent ends (Linux); end it if `parent` did already."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, number)  # PR_SET_PDEATHSIG
    if parent not in (None, os.getppid()):
        os._exit(1)
