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

    Beyond that an allocation fails, as it does on a full machine, or OutOfTime is raised as by `timed`. No memory limit
    where the system does not tell a process's size. torch computes in one thread, because to start others takes address
    space, and a library may end the process where it cannot.
    """
    import torch  # here, as it takes seconds, and a limit of time does without it

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    before = resource.getrlimit(resource.RLIMIT_AS)
    if (used := address_space()) is not None:
        limits = [bound for bound in (used + memory, *before) if bound != resource.RLIM_INFINITY]
        resource.setrlimit(resource.RLIMIT_AS, (min(limits), before[1]))
    try:
        with timed(seconds):
            yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
        torch.set_num_threads(threads)


@contextmanager
def timed(seconds: float) -> Iterator[None]:
    """Raise OutOfTime in the block after this much computing time; only in the main thread, which gets signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(_number: int, _frame: Any) -> NoReturn:
        raise OutOfTime

    handler = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, handler)
