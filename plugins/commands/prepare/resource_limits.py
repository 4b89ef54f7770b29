"""Limits on memory and time for reading untrusted files."""

import resource
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from crosstrain import DataError
from crosstrain.utils.limited_process import address_space

_MEMORY, _SECONDS = 3 << 28, 15  # limits on one step of reading: some rows of a table, or a JSON document


class _OutOfTime(BaseException):
    """Raised if the time limit is exceeded; a BaseException, because libraries may catch any Exception."""


@contextmanager
def bounded(path: Path, more: int = 0) -> Iterator[None]:
    """Limit one step of reading to 768 MiB of additional address space and 15 s of this process's CPU time.

    When the memory limit is exceeded, allocations fail as if memory were full. Memory is not limited if the system does
    not report a process's size. Time is limited only in the main thread, because only that thread receives signals.
    `more`: bytes to add to the memory limit. Raises DataError if a limit is reached.
    """

    def stop(_number: int, _frame: Any) -> NoReturn:
        raise _OutOfTime

    before = resource.getrlimit(resource.RLIMIT_AS)
    if (used := address_space()) is not None:
        limits = [bound for bound in (used + _MEMORY + more, *before) if bound != resource.RLIM_INFINITY]
        resource.setrlimit(resource.RLIMIT_AS, (min(limits), before[1]))
    timed = threading.current_thread() is threading.main_thread()
    handler = signal.signal(signal.SIGPROF, stop) if timed else None
    try:
        if timed:
            signal.setitimer(signal.ITIMER_PROF, _SECONDS)
        yield
    except (MemoryError, _OutOfTime):
        raise DataError(
            f"{path} takes more than {_MEMORY >> 20} MiB or {_SECONDS} seconds for some rows, which is unusual for text"
        ) from None
    finally:
        if timed:
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.signal(signal.SIGPROF, handler)
        resource.setrlimit(resource.RLIMIT_AS, before)
