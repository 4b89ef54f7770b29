"""Record the collectives that Python code calls, at a cost of microseconds per call, and report a rank's state."""

import functools
import inspect
import itertools
import os
import sys
import sysconfig
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from pydantic import TypeAdapter

from crosstrain.distributed.watchdog.torch_hooks import patch_collective, patch_wait
from crosstrain.utils import paths

MAX_CALLS = 2048  # calls kept per group

# Collective -> name of the argument that has the same size on all ranks; None: there is no such argument.
_COLLECTIVES: dict[str, str | None] = {
    "all_reduce": "tensor", "reduce": "tensor", "broadcast": "tensor", "reduce_scatter_tensor": "output",
    "reduce_scatter_single": "output", "all_gather_into_tensor": "input_tensor", "all_gather_single": "input_tensor",
    "_all_gather_base": "input_tensor", "all_gather": None, "reduce_scatter": None, "all_to_all": None,
    "all_to_all_single": None, "gather": None, "gather_single": None, "gather_into_tensor": None, "scatter": None,
    "all_reduce_coalesced": None, "all_gather_coalesced": None, "barrier": None, "all_gather_object": None,
    "gather_object": None, "broadcast_object_list": None, "scatter_object_list": None,
}  # fmt: skip
# Collectives in which the dtype matters; all others copy bytes.
_TYPED = ("all_reduce", "reduce", "reduce_scatter_tensor", "reduce_scatter_single")
_PACKAGES = tuple(str(Path(torch.__path__[0]).parent / name) + os.sep for name in ("torch", "deepspeed"))
_STDLIB = sysconfig.get_path("stdlib") + os.sep
_DISTRIBUTED = Path(__file__).parent.parent
_LAUNCH = str(_DISTRIBUTED / "launch") + os.sep  # folder of the files that call the worker function
_BUILT_IN = tuple(f"{folder}{os.sep}" for folder in (_DISTRIBUTED.parent.resolve(), paths.home() / "plugins"))


@dataclass(frozen=True)
class Location:
    """A line of code."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{paths.show(Path(self.file))}:{self.line} in {self.function}"

    @property
    def is_external(self) -> bool:
        """True for code outside of Crosstrain, such as a user's plugin."""
        return not self.file.startswith(_BUILT_IN)


@dataclass(frozen=True)
class Call:
    """A call to a collective, with the properties that ranks can compare."""

    operation: str
    size: str  # such as "7 float32"; empty if the size may differ between ranks
    location: Location

    def matches(self, other: "Call") -> bool:
        """True if both calls can be the same collective. Locations may differ, because code may branch on the rank."""
        return (self.operation, self.size) == (other.operation, other.size)

    def __str__(self) -> str:
        return f"{self.operation} of {self.size}" if self.size else self.operation


@dataclass
class History:
    """The latest calls of one rank on one process group."""

    ranks: list[int]  # members of the group
    first: int  # sequence number of calls[0]
    calls: list[Call]
    has_background_calls: bool = False  # some calls were made outside of the training thread

    @property
    def next(self) -> int:
        return self.first + len(self.calls)

    def __getitem__(self, number: int) -> Call:
        """Return the call at a position that the history contains."""
        return self.calls[number - self.first]

    def get(self, number: int) -> Call | None:
        return self[number] if self.first <= number < self.next else None


@dataclass
class Waiting:
    """The collective in progress in the main thread."""

    group: str
    number: int
    seconds: float


@dataclass
class RankReport:
    """The state of a rank, reported by its watchdog."""

    rank: int
    question: int  # sequence number of the latest report request that the rank received
    location: Location  # location of the main thread
    # User code that called the code at `location`; None if no user code did, or if `location` is in user code.
    external_caller: Location | None
    idle_seconds: float  # seconds since the main thread last made progress
    aborting: bool  # the backend is about to end the process
    waiting: Waiting | None
    histories: dict[str, History] = field(default_factory=dict)  # group name -> history

    def call(self, group: str, number: int) -> Call | None:
        """Return the call at a position; None if the rank has not reached the position or no longer keeps the call."""
        return self.histories[group].get(number) if group in self.histories else None

    def count(self, group: str) -> int:
        """Return the number of calls on a group so far."""
        return self.histories[group].next if group in self.histories else 0

    def waits_at(self, group: str, number: int) -> Waiting | None:
        w = self.waiting
        return w if w and (w.group, w.number) == (group, number) else None

    def dumps(self) -> bytes:
        """Encode the report as compressed JSON, which is small because most calls repeat earlier calls."""
        return zlib.compress(_REPORTS.dump_json(self), 1)

    @staticmethod
    def loads(data: bytes) -> "RankReport":
        return _REPORTS.validate_json(zlib.decompress(data))


_REPORTS = TypeAdapter(RankReport)


class FlightRecorder:
    """Records the collectives of this process until `close`.

    If a collective raises a RuntimeError, `on_error` is called in the same thread before the error propagates.
    """

    def __init__(self, on_error: Callable[[], None]) -> None:
        self._on_error = on_error
        self._logs: dict[str, _GroupLog] = {}  # group name -> log
        self._active: dict[int, tuple[str, int, float]] = {}  # thread -> (group, sequence number, start of the call)
        self.waited = 0.0  # seconds for which the main thread has waited for other ranks; on GPUs, waits return at once
        self._restore = [patch_wait(self._timed), *(patch_collective(name, self._recorded) for name in _COLLECTIVES)]

    def close(self) -> None:
        for restore in self._restore:
            restore()
        self._logs.clear()

    def waiting(self, thread: int) -> Waiting | None:
        """Return the collective in progress in a thread; None if the thread is not in a collective."""
        active = self._active.get(thread)
        return Waiting(active[0], active[1], time.monotonic() - active[2]) if active else None

    def progress(self, thread: int) -> Any:
        """Return a value that changes when any thread enters a collective, and when `thread` leaves a collective."""
        return self._active.get(thread), [log.calls[-1][0] for log in list(self._logs.values()) if log.calls]

    def histories(self, training: int, depth: int) -> dict[str, History]:
        """Return the latest `depth` calls on each group; `training` is the training thread's ID."""
        # Autograd's threads do not count as background threads: Python lists them as dummy threads, or not at all.
        background = {t.ident for t in threading.enumerate() if not isinstance(t, threading._DummyThread)} - {training}
        return {name: log.history(background, depth) for name, log in list(self._logs.items()) if log.calls}

    def _recorded(self, operation: str, function: Callable[..., Any]) -> Callable[..., Any]:
        parameters = list(inspect.signature(function).parameters)
        group_at, sized = parameters.index("group"), _COLLECTIVES[operation]
        sized_at = parameters.index(sized) if sized else 0
        active, this_thread, now = self._active, threading.get_ident, time.monotonic

        @functools.wraps(function)
        def recorded(*args: Any, **kwargs: Any) -> Any:
            thread = this_thread()
            if thread in active:  # a composite collective makes this call
                return function(*args, **kwargs)
            log = self._log(args[group_at] if len(args) > group_at else kwargs.get("group"))
            if log is None:
                return function(*args, **kwargs)
            tensor = (args[sized_at] if len(args) > sized_at else kwargs.get(sized)) if sized else None
            size = (tensor.numel(), tensor.dtype) if isinstance(tensor, torch.Tensor) else None
            number = next(log.numbers)
            log.calls.append((number, operation, size, _call_site(), thread))
            active[thread] = (log.group, number, now())
            try:
                return function(*args, **kwargs)
            except RuntimeError:
                self._on_error()
                raise
            finally:
                del active[thread]

        return recorded

    def _timed(self, wait: Callable[..., Any]) -> Callable[..., Any]:
        main, this_thread, now = threading.main_thread().ident, threading.get_ident, time.monotonic

        @functools.wraps(wait)
        def timed(*args: Any, **kwargs: Any) -> Any:
            started = now()
            try:
                return wait(*args, **kwargs)
            finally:
                if this_thread() == main:
                    self.waited += now() - started

        return timed

    def _log(self, group: Any) -> "_GroupLog | None":
        if group is None:
            group = dist.group.WORLD
        name = getattr(group, "group_name", None)
        log = self._logs.get(name) if name is not None else None
        if log is None and name is not None:  # without a name, this rank is not in the group
            with suppress(KeyError):  # torch did not create this group
                log = self._logs.setdefault(name, _GroupLog(name, group))
        return log


class _GroupLog:
    """This rank's calls on one process group."""

    def __init__(self, name: str, group: dist.ProcessGroup) -> None:
        self.group, self.ranks = name, dist.get_process_group_ranks(group)
        self.numbers = itertools.count()
        self.calls: deque[Any] = deque(maxlen=MAX_CALLS)

    def history(self, background: set[int | None], depth: int) -> History:
        everything = sorted(self.calls.copy())
        latest = everything[-depth:]  # threads may append out of order, so sequence numbers may be missing
        latest = [call for i, call in enumerate(latest) if call[0] == latest[0][0] + i]
        return History(
            self.ranks,
            latest[0][0],
            [Call(call[1], _size(call[1], call[2]), Location(*call[3])) for call in latest],
            any(call[4] in background for call in everything),
        )


def _size(operation: str, size: tuple[Any, torch.dtype] | None) -> str:
    if size is None or type(size[0]) is not int:
        return ""
    number, dtype = size
    return (
        f"{number} {str(dtype).removeprefix('torch.')}" if operation in _TYPED else f"{number * dtype.itemsize} bytes"
    )


@functools.cache
def _is_library(file: str) -> bool:
    """Return True for library code; a location is the innermost line outside of library code."""
    stdlib = file.startswith(_STDLIB) and f"{os.sep}site-packages{os.sep}" not in file
    return stdlib or file.startswith(("<", *_PACKAGES, str(_DISTRIBUTED)))


def _call_site() -> tuple[str, int, str]:
    """Return the file, line and function that made the call being recorded."""
    frame = sys._getframe(2)
    while _is_library(frame.f_code.co_filename) and frame.f_back is not None:
        frame = frame.f_back
    return _line(frame)


def _line(frame: FrameType) -> tuple[str, int, str]:
    return frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name


def locate(innermost: FrameType) -> tuple[Location, Location | None]:
    """Return a thread's location and, if the location is in Crosstrain, the user code that called it."""
    stack = []
    frame: FrameType | None = innermost
    while frame is not None and not frame.f_code.co_filename.startswith(_LAUNCH):
        if not _is_library(frame.f_code.co_filename):
            stack.append(Location(*_line(frame)))
        frame = frame.f_back
    location = stack[0] if stack else Location(*_line(innermost))
    return location, None if location.is_external else next((caller for caller in stack if caller.is_external), None)
