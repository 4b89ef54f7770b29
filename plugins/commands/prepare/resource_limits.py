"""Limits on memory and time, for code that handles sizes from untrusted input."""

import resource
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from crosstrain.utils.limited_process import address_space


class OutOfTime(BaseException):
    """A time limit was exceeded. This is not an Exception, because libraries could catch that."""


@contextmanager
def at_most(memory: int, seconds: float) -> Iterator[None]:
    """Limit the block to `memory` more bytes of address space and `seconds` of this process's CPU time.

    When the memory limit is exceeded, allocations fail as if memory were full. When the time limit is exceeded,
    OutOfTime is raised. Memory is not limited if the system does not report a process's size. Time is limited only in
    the main thread, because only that thread receives signals.
    """

    def stop(_number: int, _frame: Any) -> NoReturn:
        raise OutOfTime

    before = resource.getrlimit(resource.RLIMIT_AS)
    if (used := address_space()) is not None:
        limits = [bound for bound in (used + memory, *before) if bound != resource.RLIM_INFINITY]
        resource.setrlimit(resource.RLIMIT_AS, (min(limits), before[1]))
    timed = threading.current_thread() is threading.main_thread()
    handler = signal.signal(signal.SIGPROF, stop) if timed else None
    try:
        if timed:
            signal.setitimer(signal.ITIMER_PROF, seconds)
        yield
    finally:
        if timed:
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.signal(signal.SIGPROF, handler)
        resource.setrlimit(resource.RLIMIT_AS, before)
