"""Run a function in a separate process, with limits on memory and CPU time."""

import ctypes
import gc
import io
import multiprocessing
import os
import resource
import signal
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from crosstrain.utils.errors import UserError, first_line, os_errors_as
from crosstrain.utils.forks import CheckedForkContext

_PER_SECOND = 20_000  # bytes of text that extend the time limit of a call by one second
_PER_BYTE = 400  # additional bytes of memory per byte of text
_WAITING = 20  # maximum ratio of wall time to CPU time; large, because the machine may be busy
_IDLE = 60.0  # the process ends after this many seconds without a call


class LimitError(UserError):
    """A call that raised an error in its process, or made the process crash."""


class TooLate(LimitError):
    """A call that did not finish in time."""


class NoProcess(LimitError):
    """A call for which no process could be started. A later attempt may succeed."""


class LimitedProcess:
    """A function for untrusted data, called in a forked process that can be killed.

    The process starts on the first call, and again on the next call after a failure or a long pause. Only one thread
    at a time may call the function.
    """

    def __init__(
        self,
        function: Callable[[Any], Any],
        name: str,
        *,
        memory: int = 1 << 30,
        seconds: float = 10.0,
        urgent: bool = False,
        advice: str = "use a shorter or a different text",
    ) -> None:
        """name: subject of error messages. memory: limit in bytes, in addition to the caller's memory.

        seconds: limit of CPU time per call. urgent: somebody waits for the result, so `seconds` limits the wall time.
        advice: end of the error message when a limit is exceeded.
        """
        self._function, self.name, self._advice = function, name, advice
        self._memory, self._seconds, self._urgent = memory, seconds, urgent
        self._owner = 0  # PID of the process that forked the child

    def __call__(self, given: Any, size: int = 0) -> Any:
        """Return function(given). The limits grow with `size`, the bytes of text in `given`.

        Raises the function's UserError, and LimitError for any other error or if a limit is exceeded.
        """
        if self._owner != os.getpid():
            with os_errors_as(NoProcess, f"{self.name} could not start a process; try again later"):
                self._start()
        seconds = self._seconds + size / _PER_SECOND
        computing = seconds + 1 if self._urgent else seconds  # so that the limit of wall time is reached first
        try:
            self._connection.send((given, self._memory + size * _PER_BYTE, computing))
            if not self._connection.poll(seconds if self._urgent else seconds * _WAITING):
                self.close()
                raise TooLate(f"{self.name} did not finish within {seconds:g} s; {self._advice}")
            error, result = self._connection.recv()
        except (OSError, EOFError):
            if (code := self.close()) in (0, -signal.SIGTERM):  # it was idle, or got the signal that ends a run
                return self(given, size)
            late = code == -signal.SIGPROF
            how = f"took more than {round(seconds, 1)} s of CPU time" if late else "crashed or used too much memory"
            raise LimitError(f"{self.name} {how}; {self._advice}") from None
        if error is not None:
            raise error
        return result

    def close(self) -> int | None:
        """End the process, if there is one, and return its exit code."""
        if self._owner != os.getpid():
            return None
        self._owner = 0
        self._connection.close()
        self._process.kill()
        self._process.join()
        return self._process.exitcode

    def _start(self) -> None:
        self._connection, theirs = multiprocessing.Pipe()
        multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # a daemon may not fork
        self._process = CheckedForkContext().Process(target=self._serve, args=(theirs,), daemon=True)
        self._process.start()
        self._owner = os.getpid()
        theirs.close()

    def _serve(self, connection: Connection) -> None:
        """Answer calls with (error, result) until the caller ends or makes no call for `_IDLE` seconds."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the caller decides when to stop
        for number in (signal.SIGTERM, signal.SIGPROF):
            signal.signal(number, signal.SIG_DFL)
        for output in (1, 2):  # hide the output of Rust panics; the error goes to the caller
            os.dup2(os.open(os.devnull, os.O_WRONLY), output)
        sys.stdout = sys.stderr = io.StringIO()  # a notebook's streams use files that are closed below
        # Close the caller's connections; otherwise, they would stay open as long as this process runs.
        os.closerange(3, connection.fileno())
        os.closerange(connection.fileno() + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        if (torch := sys.modules.get("torch")) is not None:
            torch.set_num_threads(1)  # the caller's compute threads do not exist after a fork
        gc.freeze()  # memory freed by collecting the caller's objects would not count against the limit
        used, (soft, hard) = address_space(), resource.getrlimit(resource.RLIMIT_AS)
        if used is not None:
            resource.setrlimit(resource.RLIMIT_AS, (used, hard))
            _take_free_memory()
            resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        while connection.poll(_IDLE):
            given, memory, seconds = connection.recv()
            if used is not None:
                resource.setrlimit(resource.RLIMIT_AS, (used + memory, hard))
            signal.setitimer(signal.ITIMER_PROF, seconds)
            connection.send(self._answer(given))
            signal.setitimer(signal.ITIMER_PROF, 0)

    def _answer(self, given: Any) -> tuple[UserError | None, Any]:
        try:
            return None, self._function(given)
        except BaseException as error:  # a Rust panic is not an Exception
            failure = LimitError(f"{self.name} failed ({first_line(error)[:1000]})")
            return error if isinstance(error, UserError) else failure, None


def _take_free_memory() -> None:
    """Allocate the large free blocks that malloc keeps, so that each later large allocation grows the address space.

    Call this while the address space cannot grow. Nothing is written to the blocks, so no memory is used.
    """
    malloc, size = ctypes.CDLL(None).malloc, 1 << 40
    malloc.argtypes, malloc.restype = [ctypes.c_size_t], ctypes.c_void_p
    while size >= 1 << 20:
        if not malloc(size):
            size >>= 1


def address_space() -> int | None:
    """Return the bytes of address space that this process uses; None if the system does not report them."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except OSError:
        return None
