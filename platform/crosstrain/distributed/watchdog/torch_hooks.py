"""Private APIs of torch and gloo that the watchdog uses, as of torch 2.13 and 2.14.

If a torch version lacks one of these APIs, collectives are not recorded, and training continues.
"""

import ctypes
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import CellType
from typing import Any

import torch
import torch.distributed as dist


def patch_collective(name: str, wrap: Callable[[str, Callable[..., Any]], Callable[..., Any]]) -> Callable[[], None]:
    """Replace the collective f called `name` with `wrap(name, f)`, and return a function that restores f.

    torch decorates its collectives, and f is replaced inside the decorator's closure. The change also affects callers
    that imported the name earlier, and torch.compile still sees the original function object.
    """
    function = getattr(dist.distributed_c10d, name, None)
    if function is None or "func" not in function.__code__.co_freevars:
        return lambda: None
    cell: CellType = function.__closure__[function.__code__.co_freevars.index("func")]
    original = cell.cell_contents
    cell.cell_contents = torch.compiler.disable(wrap(name, original))
    return lambda: setattr(cell, "cell_contents", original)


def patch_wait(wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Callable[[], None]:
    """Replace the wait f for a collective or a message with `wrap(f)`, and return a function that restores f.

    torch's Python code waits with this method, also in calls that are not asynchronous.
    """
    original = dist.Work.wait
    dist.Work.wait = torch.compiler.disable(wrap(original))  # type: ignore[method-assign]
    return lambda: setattr(dist.Work, "wait", original)


def delay_abort() -> Callable[[], None]:
    """Delay an abort of this process by six seconds, so that the watchdog can report. Returns an undo function.

    gloo aborts in its own thread if a message is longer than expected. The signal handler is the C function `sleep`,
    called with the signal number 6, so it sleeps for six seconds. No Python code runs in the broken process.
    """
    libc = ctypes.CDLL(None)
    handle = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)(("signal", libc))
    before = handle(signal.SIGABRT, ctypes.cast(libc.sleep, ctypes.c_void_p))
    return lambda: handle(signal.SIGABRT, before)


def is_aborting() -> bool:
    """Return True while a gloo thread is in the signal handler of `delay_abort` (Linux)."""
    for task in Path("/proc/self/task").glob("*/status"):
        with suppress(OSError, KeyError):  # the thread has just ended
            status = dict(line.split(":\t", 1) for line in task.read_text().splitlines() if ":\t" in line)
            if status["Name"].startswith("gloo") and int(status["SigBlk"], 16) >> (signal.SIGABRT - 1) & 1:
                return True
    return False
