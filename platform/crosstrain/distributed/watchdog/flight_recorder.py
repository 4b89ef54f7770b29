"""Noting the collectives that Python calls, in microseconds each."""

from __future__ import annotations

import functools
import inspect
import itertools
import os
import sys
import sysconfig
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import CellType, FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from crosstrain.distributed import launch
from crosstrain.distributed.watchdog.rank_report import Call, History, Place, Waiting

REMEMBERED = 2048  # calls per group

# Collectives, each with the argument that has one size on every rank, if there is such a one.
_COLLECTIVES: dict[str, str | None] = {
    "all_reduce": "tensor", "reduce": "tensor", "broadcast": "tensor", "reduce_scatter_tensor": "output",
    "reduce_scatter_single": "output", "all_gather_into_tensor": "input_tensor", "all_gather_single": "input_tensor",
    "_all_gather_base": "input_tensor", "all_gather": None, "reduce_scatter": None, "all_to_all": None,
    "all_to_all_single": None, "gather": None, "gather_single": None, "gather_into_tensor": None, "scatter": None,
    "all_reduce_coalesced": None, "all_gather_coalesced": None, "barrier": None, "all_gather_object": None,
    "gather_object": None, "broadcast_object_list": None, "scatter_object_list": None,
}  # fmt: skip
# Frames of these files are outside of any worker's code.
_OUTERMOST = tuple(str(Path(launch.__path__[0]) / name) for name in ("launcher.py", "worker_errors.py"))
_TYPED = ("all_reduce", "reduce", "reduce_scatter_tensor", "reduce_scatter_single")  # others move bytes of any type


class Recorder:
    """Notes the collectives of this process, from its making until `close`.

    Where one raises a RuntimeError, `failed` is called before the error goes on, in the same thread.
    """

    def __init__(self, failed: Callable[[], None]) -> None:
        self._failed = failed
        self._logs: dict[str, _Log] = {}  # by group
        self._inside: dict[int, tuple[str, int, float]] = {}  # by thread: group and number of its call, since when
        self._restore = [_hook(name, self._noting) for name in _COLLECTIVES]
        self._restore += [self._hook_between_two(name) for name in ("send", "recv", "recv_anysource")]

    def close(self) -> None:
        for restore in self._restore:
            restore()
        self._logs.clear()

    def waiting(self, thread: int) -> Waiting | None:
        """The collective in which a thread is."""
        inside = self._inside.get(thread)
        return Waiting(inside[0], inside[1], time.monotonic() - inside[2]) if inside else None

    def mark(self, thread: int) -> Any:
        """Something that changes when this thread enters or leaves a collective, or another enters one."""
        return self._inside.get(thread), [log.calls[-1][0] for log in list(self._logs.values()) if log.calls]

    def histories(self, training: int, depth: int) -> dict[str, History]:
        """The latest `depth` calls, by group; `training` is the thread that is not in the background."""
        threads = (thread for thread in threading.enumerate() if not isinstance(thread, threading._DummyThread))
        background = {thread.ident for thread in threads} - {training}  # autograd's threads are no part of it
        return {name: log.history(background, depth) for name, log in list(self._logs.items()) if log.calls}

    def _noting(self, operation: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, a collective, with its calls noted."""
        parameters = list(inspect.signature(function).parameters)
        group_at, sized = parameters.index("group"), _COLLECTIVES[operation]
        sized_at = parameters.index(sized) if sized else 0
        inside, here, now = self._inside, threading.get_ident, time.monotonic

        @functools.wraps(function)
        def noted(*args: Any, **kwargs: Any) -> Any:
            thread = here()
            if thread in inside:  # a collective that is built of others
                return function(*args, **kwargs)
            log = self._log(args[group_at] if len(args) > group_at else kwargs.get("group"))
            if log is None:
                return function(*args, **kwargs)
            tensor = (args[sized_at] if len(args) > sized_at else kwargs.get(sized)) if sized else None
            size = (tensor.numel(), tensor.dtype) if isinstance(tensor, torch.Tensor) else None
            number = next(log.numbers)
            log.calls.append((number, operation, size, _calling_line(), thread, log.begun()))
            inside[thread] = (log.group, number, now())
            try:
                return function(*args, **kwargs)
            except RuntimeError:
                self._failed()
                raise
            finally:
                del inside[thread]

        return _opaque(noted)

    def _log(self, group: Any) -> _Log | None:
        if group is None:
            group = dist.group.WORLD
        name = getattr(group, "group_name", None)
        log = self._logs.get(name) if name is not None else None
        if log is None and name is not None:  # else this rank is not in the group
            with suppress(KeyError):  # of a group that torch has not made
                log = self._logs.setdefault(name, _Log(name, group))
        return log

    def _hook_between_two(self, name: str) -> Callable[[], None]:
        """Note where two ranks talk with each other alone: backends count that, on these two."""
        function = getattr(dist.ProcessGroup, name)

        def noted(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
            if (log := self._log(group)) is not None:
                log.between_two = True
            return function(group, *args, **kwargs)

        setattr(dist.ProcessGroup, name, _opaque(noted))
        return lambda: setattr(dist.ProcessGroup, name, function)


class _Log:
    """This rank's calls on one process group."""

    def __init__(self, name: str, group: dist.ProcessGroup) -> None:
        self.group, self.ranks = name, dist.get_process_group_ranks(group)
        self.numbers = itertools.count()
        self.calls: deque[Any] = deque(maxlen=REMEMBERED)
        self.begun = _counter(group)
        self.between_two = self.begun() < 0

    def history(self, background: set[int | None], depth: int) -> History:
        everything = sorted(self.calls.copy())
        noted = everything[-depth:]  # of two threads the one with the higher number may have been first,
        noted = [call for i, call in enumerate(noted) if call[0] == noted[0][0] + i]  # and the other yet to come
        calls = [Call(call[1], _size(call[1], call[2]), Place(*call[3])) for call in noted]
        positions, begun = [call[5] for call in noted], None if self.between_two else self.begun()
        in_background = any(call[4] in background for call in everything)
        return History(self.ranks, noted[0][0], calls, positions, begun, in_background)


def _counter(group: dist.ProcessGroup) -> Callable[[], int]:
    """What tells how many collectives the backends of a group have begun; negative where they do not count."""
    try:
        backends: dict[int, Any] = {id(b): b for b in (group._get_backend(device) for device in group._device_types)}
        counters = [backend._get_sequence_number_for_group for backend in backends.values()]
        for counter in counters:
            counter()
    except (AttributeError, RuntimeError):
        return lambda: -1
    return counters[0] if len(counters) == 1 else lambda: sum(counter() for counter in counters)


def _size(operation: str, size: tuple[Any, torch.dtype] | None) -> str:
    if size is None or type(size[0]) is not int:
        return ""
    number, dtype = size
    return (
        f"{number} {str(dtype).removeprefix('torch.')}" if operation in _TYPED else f"{number * dtype.itemsize} bytes"
    )


class _Plumbing(dict[str, bool]):
    """Whether a file is one through which collectives are called, not one that means to call them."""

    _PACKAGES = tuple(str(Path(torch.__path__[0]).parent / name) + os.sep for name in ("torch", "deepspeed"))
    _STDLIB = sysconfig.get_path("stdlib") + os.sep
    _HERE = Path(__file__).parent
    _FILES = (str(_HERE.parent / "group.py"), str(_HERE / "flight_recorder.py"), str(_HERE / "watchdog.py"))

    def __missing__(self, file: str) -> bool:
        stdlib = file.startswith(self._STDLIB) and f"{os.sep}site-packages{os.sep}" not in file
        self[file] = stdlib or file.startswith(("<", *self._PACKAGES)) or file in self._FILES
        return self[file]


_plumbing = _Plumbing()


def _calling_line() -> tuple[str, int, str]:
    """File, line and function that called a collective."""
    frame = sys._getframe(2)
    while _plumbing[frame.f_code.co_filename] and frame.f_back is not None:
        frame = frame.f_back
    return _line(frame)


def _line(frame: FrameType) -> tuple[str, int, str]:
    return frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name


def whereabouts(innermost: FrameType) -> tuple[Place, Place | None]:
    """Where a thread is, and, if that is Crosstrain's own code, the plugged-in code that called it."""
    places = []
    frame: FrameType | None = innermost
    while frame is not None and frame.f_code.co_filename not in _OUTERMOST:
        if not _plumbing[frame.f_code.co_filename]:
            places.append(Place(*_line(frame)))
        frame = frame.f_back
    at = places[0] if places else Place(*_line(innermost))
    return at, None if at.is_plugged_in else next((place for place in places if place.is_plugged_in), None)


def _opaque(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, into which and below which torch.compile does not look.

    What `torch.compiler.disable` does, without its cost per call and without loading the compiler.
    """
    try:
        from torch._C._dynamo import eval_frame as frames

        skip = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.SKIP)
        frames.set_code_exec_strategy(function.__code__, skip)
    except (AttributeError, ImportError, TypeError):  # another version of torch
        return torch.compiler.disable(function)
    function.__dict__["_torchdynamo_disable"] = True
    return function


def _hook(name: str, noting: Callable[[str, Callable[..., Any]], Callable[..., Any]]) -> Callable[[], None]:
    """Put `noting(name, f)` in the place of the collective f; returns what takes it back.

    torch decorates its collectives, and f is exchanged inside the decorator. That reaches callers that imported the
    name long before, and torch.compile still sees the object that it knows.
    """
    function = getattr(distributed_c10d, name, None)
    if function is None or "func" not in function.__code__.co_freevars:  # another version of torch
        return lambda: None
    cell: CellType = function.__closure__[function.__code__.co_freevars.index("func")]
    original = cell.cell_contents
    cell.cell_contents = noting(name, original)
    return lambda: setattr(cell, "cell_contents", original)
