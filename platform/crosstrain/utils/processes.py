"""Spawned processes that end with their parent and do not run the main script again."""

import ctypes
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType


@contextmanager
def main_hidden() -> Iterator[None]:
    """Hide the main module from processes that are spawned in the block, because importing it may run the script."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")  # without a file
    try:
        yield
    finally:
        sys.modules["__main__"] = main


class Bond:
    """An argument for spawned processes: a process that unpickles a Bond is killed when its parent process ends."""

    def __reduce__(self) -> tuple:
        return on_parents_death, (signal.SIGKILL, os.getpid())


def on_parents_death(number: signal.Signals, parent: int | None = None) -> None:
    """Ask the kernel to signal this process when its parent ends (Linux). Exits if `parent` has already ended."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, number)  # PR_SET_PDEATHSIG
    if parent not in (None, os.getppid()):
        os._exit(1)
