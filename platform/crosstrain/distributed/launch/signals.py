"""Requests to stop: until there is something to save they kill the process; then the trainer reads them."""

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


def stop_signals() -> list[signal.Signals]:
    """Return the signals that ask to stop; without SIGHUP, of a closed terminal, where it is ignored, as by nohup."""
    hangs_up = signal.getsignal(signal.SIGHUP) != signal.SIG_IGN
    return [signal.SIGINT, signal.SIGUSR1, signal.SIGTERM, *([signal.SIGHUP] if hangs_up else [])]


@contextmanager
def sigint_kills() -> Iterator[None]:
    """Let Ctrl-C kill the process inside this block: a library being imported there may swallow KeyboardInterrupt."""
    handler = signal.getsignal(signal.SIGINT)
    in_charge = threading.current_thread() is threading.main_thread() and os.getpid() != 1  # 1 survives the default
    if handler is not signal.default_int_handler or not in_charge:
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)


def exit_after_signal(seconds: float) -> None:
    """End this process with code 0, whatever its threads do, `seconds` after a signal to stop.

    Python's handlers run between two steps of the main thread, which may not come; a socket hears of signals at once.
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
    """A request to stop, true once a signal for it came: the trainer saves and leaves. The second SIGINT kills.

    Under our own launcher SIGTERM keeps its default: that is how the launcher ends the ranks that wait for a dead one,
    or whose user presses Ctrl-C again. It forwards a user's signals as SIGUSR1. When it is killed, the system
    sends SIGINT, once for each of its threads that the worker is handed to; none of them is a reason to break the save.
    """

    def __init__(self, under_launcher: bool) -> None:
        self.received: signal.Signals | None = None
        self._second_kills = not under_launcher
        for number in stop_signals():
            if number != signal.SIGTERM or not under_launcher:
                signal.signal(number, self._note)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        if self._second_kills and self.received is not None and number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        self.received = signal.Signals(number)

    def __bool__(self) -> bool:
        return self.received is not None
