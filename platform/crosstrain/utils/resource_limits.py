"""Limits on memory and time, for code that works with sizes of somebody else's choice."""

import resource
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from crosstrain.utils.limited_process import address_space


class OutOfTime(BaseException):
    """The end of a time limit. Not an Exception, which a library could catch."""


@contextmanager
def at_most(memory: int, seconds: float) -> Iterator[None]:
    """Limit the block to `memory` more bytes of address space and `seconds` of this process's computing time.

    Beyond that an allocation fails, as it does on a full machine, or OutOfTime is raised. No memory limit where the
    system does not tell a process's size, and no limit of time outside of the main thread, which gets signals.
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
