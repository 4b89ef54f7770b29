"""Signals that request a stop.

Until there is something to save, such a signal kills the process. From then on, the trainer saves and exits.
"""

import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

from crosstrain.distributed.launch import membership

if TYPE_CHECKING:  # the command line imports this file before torch
    from crosstrain.distributed.group import Group


def stop_signals() -> list[signal.Signals]:
    """Return the signals that request a stop. SIGHUP (closed terminal) is left out if it is ignored, as under nohup."""
    hangs_up = signal.getsignal(signal.SIGHUP) != signal.SIG_IGN
    return [signal.SIGINT, signal.SIGUSR1, signal.SIGTERM, *([signal.SIGHUP] if hangs_up else [])]


@contextmanager
def sigint_kills() -> Iterator[None]:
    """Let Ctrl-C in the block kill the process, because libraries may swallow KeyboardInterrupt during import."""
    handler = signal.getsignal(signal.SIGINT)
    in_charge = threading.current_thread() is threading.main_thread() and os.getpid() != 1  # SIG_DFL cannot kill PID 1
    if handler is not signal.default_int_handler or not in_charge:
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)


@contextmanager
def forwarded(stop: list[int], then: Callable[[bool], None] = lambda _: None) -> Iterator[None]:
    """Append signals to stop to `stop`, and forward them to the child processes; a second SIGINT ends them at once.

    Afterwards, `then` is called with True if there are child processes.
    """

    def forward(number: int, _frame: FrameType | None) -> None:
        stop.append(number)
        children = multiprocessing.active_children()
        at_once = stop.count(signal.SIGINT) > 1  # a second Ctrl-C
        for child in children:
            if child.pid is not None:
                os.kill(child.pid, signal.SIGTERM if at_once else signal.SIGUSR1)
        then(bool(children))

    handlers = {number: signal.signal(number, forward) for number in stop_signals()}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def exit_after_signal(seconds: float) -> None:
    """Exit this process with code 0, `seconds` after a stop signal, even if its threads are blocked.

    Python's signal handlers run in the main thread, which may be blocked. The wakeup socket receives signals at once.
    """
    reading, writing = socket.socketpair()
    writing.setblocking(False)
    signal.set_wakeup_fd(writing.detach(), warn_on_full_buffer=False)

    def end() -> None:
        while reading.recv(1)[0] not in stop_signals():
            pass
        time.sleep(seconds)
        os._exit(0)

    threading.Thread(target=end, daemon=True).start()


class StopRequest:
    """A flag that is true after a stop signal; the trainer then saves and exits.

    Without our own launcher, a second SIGINT kills the process. Under our own launcher, SIGTERM keeps its default
    action: the launcher sends SIGTERM to ranks that wait for a dead rank, and to all ranks after a second Ctrl-C. The
    launcher forwards the user's signals as SIGUSR1. If the launcher is killed, the kernel sends SIGINT to the worker
    once for each launcher thread that becomes the worker's parent. These repeated signals must not interrupt the save.
    """

    def __init__(self, under_launcher: bool) -> None:
        self.received: signal.Signals | None = None
        self.under_launcher, self.members = under_launcher, membership.current
        for number in stop_signals():
            if number != signal.SIGTERM or not under_launcher:
                signal.signal(number, self._note)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        if not self.under_launcher and self.received is not None and number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        self.received = signal.Signals(number)

    def __bool__(self) -> bool:
        return self.received is not None or (self.members is not None and self.members.ends_epoch)

    def confirm(self, ranks: "Group") -> None:
        """Raise Regroup if no rank got a signal, but ranks are asked to take up a new worker. Collective."""
        if self.members is not None and not any(ranks.all_gather(self.received)):
            raise membership.Regroup
