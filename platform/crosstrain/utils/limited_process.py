"""A function in a process of its own, with limits on memory and computing time."""

import multiprocessing
import os
import resource
import signal
import warnings
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

from crosstrain.utils.errors import UserError, first_line

_PER_SECOND = 20_000  # bytes of text for which a call gets one second more
_PER_BYTE = 400  # bytes of memory that a call gets more for each byte of text
_PATIENCE = 0.5  # seconds after which an urgent call has to make way for others
_WAITING = 20  # seconds that a call may last per second of computing, on a machine that others use too
_IDLE = 60.0  # seconds without a call after which the process ends


class LimitError(UserError):
    """A call that reached a limit, or failed in its process."""

    late = False  # the caller waited too long


class LimitedProcess:
    """A function of data that somebody else wrote, called in a forked process that can be killed.

    The process starts with a call, where there is none: the first one, and the next after a failure or a long pause.
    One thread at a time may call.
    """

    def __init__(
        self, function: Callable[[Any], Any], name: str, *, memory: int = 1 << 30, seconds: float = 10.0,
        urgent: bool = False,
    ) -> None:  # fmt: skip
        """name: the subject of errors. memory: bytes beyond those of the caller. seconds: of computing time for a call.

        urgent: somebody waits for the result, so `seconds` are of the clock.
        """
        self._function, self.name = function, name
        self._memory, self._seconds, self._urgent = memory, seconds, urgent
        self._owner = 0  # the process that forked ours

    def __call__(self, given: Any, size: int = 0) -> Any:
        """Return function(given). The limits grow with the `size` of a text in it, in bytes.

        Raises the function's own UserError, and LimitError for any other error and beyond a limit.
        """
        if self._owner != os.getpid():
            self._start()
        seconds = self._seconds + size / _PER_SECOND
        try:
            self._connection.send((given, self._memory + size * _PER_BYTE, seconds + self._urgent))
            self._wait(seconds)
            error, result = self._connection.recv()
        except (OSError, EOFError):
            status = self.close()
            if status == 0:  # it had just ended for want of calls
                return self(given, size)
            how = "crashed or took too much memory"
            if status == signal.SIGPROF:
                how = f"took more than {seconds:g} s of computing"
            raise LimitError(f"{self.name} {how}") from None
        if error is not None:
            raise error
        return result

    def close(self) -> int:
        """End the process, which need not be there; returns the status that os.waitpid gives."""
        if self._owner != os.getpid():
            return 0
        self._owner = 0
        self._connection.close()
        with suppress(ProcessLookupError, ChildProcessError):
            os.kill(self._pid, signal.SIGKILL)
            return os.waitpid(self._pid, 0)[1]
        return -1

    def __del__(self) -> None:
        self.close()

    def _wait(self, seconds: float) -> None:
        """Wait for the result. LimitError where it does not come."""
        if not self._urgent:
            seconds *= _WAITING
        elif not self._connection.poll(_PATIENCE):
            os.setpriority(os.PRIO_PROCESS, self._pid, 10)
            seconds -= _PATIENCE
        if not self._connection.poll(seconds):
            self.close()
            error = LimitError(f"{self.name} has no result after {self._seconds:g} s")
            error.late = True
            raise error

    def _start(self) -> None:
        self._connection, theirs = multiprocessing.Pipe()
        with warnings.catch_warnings(action="ignore"):  # of threads, whose locks the function does not use
            self._pid = os.fork()
        if not self._pid:
            self._serve(theirs)
        self._owner = os.getpid()
        theirs.close()

    def _serve(self, connection: Connection) -> NoReturn:
        """Answer calls with (error, result) until the caller is gone."""
        code = 1
        try:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # the caller decides when to stop
            for number in (signal.SIGTERM, signal.SIGPROF):
                signal.signal(number, signal.SIG_DFL)
            for output in (1, 2):  # Rust's panics; the error goes to the caller
                os.dup2(os.open(os.devnull, os.O_WRONLY), output)
            # Connections of the caller would stay open as long as this process.
            os.closerange(3, connection.fileno())
            os.closerange(connection.fileno() + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
            used, hard = address_space() or 0, resource.getrlimit(resource.RLIMIT_AS)[1]
            while connection.poll(_IDLE):
                given, memory, seconds = connection.recv()
                if used:
                    resource.setrlimit(resource.RLIMIT_AS, (used + memory, hard))
                signal.setitimer(signal.ITIMER_PROF, seconds)
                connection.send(self._answer(given))
                signal.setitimer(signal.ITIMER_PROF, 0)
            code = 0
        finally:
            os._exit(code)

    def _answer(self, given: Any) -> tuple[UserError | None, Any]:
        try:
            return None, self._function(given)
        except UserError as error:
            return error, None
        except MemoryError:
            os._exit(1)
        except BaseException as error:  # a panic in Rust is no Exception
            return LimitError(f"{self.name} fails ({first_line(error)[:1000]})"), None


def address_space() -> int | None:
    """Bytes of address space that this process uses; None where the system does not tell."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except OSError:
        return None
