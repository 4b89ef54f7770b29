"""A guard over collectives that some ranks never enter.

Such a call hangs, fails with words that help nobody, or meets another call of the same size and exchanges the wrong
numbers. The guard notes every collective that Python calls, on every rank. A thread beside training notices when
training does not move, has all ranks say where they are through the launcher's store, and ends the run with one
sentence if their calls cannot belong together, or if some rank does not come.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import signal
import sys
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist

from crosstrain.distributed.launch import worker_errors
from crosstrain.distributed.watchdog.diagnosis import SETTLED, absence, deadlock, mismatch
from crosstrain.distributed.watchdog.flight_recorder import REMEMBERED, Recorder, whereabouts
from crosstrain.distributed.watchdog.rank_report import State
from crosstrain.utils.errors import RankLost, TrainingError, UserError
from crosstrain.utils.logging import log

_TICK = 0.5  # seconds between two looks at training
_ANSWERING = 1.5  # seconds that other ranks have to say where they are
_FEW = 64  # calls that ranks tell of at first
_EARNEST = 3 * SETTLED  # seconds without a move after which they tell of all that they remember
_LEAVING = 5.0  # seconds that a rank stays after another has told; launchers take the first that ends for the cause

_guard: Guard | None = None


def backend_timeout(limit: float | None) -> timedelta:
    """When the backend gives up by itself: later than a guard with this limit."""
    return timedelta(minutes=30) if limit is None else timedelta(seconds=limit + 60)


def install(limit: float | None) -> None:
    """Watch the collectives of this process from now on, if there are other ranks. Collective.

    A rank that enters one `limit` seconds later than another ends the run; None: nothing is watched.
    """
    global _guard
    remove()
    if limit is not None and dist.get_world_size() > 1:
        try:
            _guard = Guard(limit)
        except RuntimeError as error:
            log.warning("collectives are not watched, because the ranks' store cannot be reached (%s)", error)


def remove() -> None:
    """Stop watching; to be called where all ranks are about to leave."""
    global _guard
    if _guard is not None:
        _guard.close()
        _guard = None


def mispaired(group: dist.ProcessGroup) -> NoReturn:
    """For a collective on `group` that met others: ends the run and says which.

    Raises TrainingError where that cannot be found out.
    """
    if _guard is not None:
        _guard.explain(mispaired=group.group_name)
    at, _ = whereabouts(sys._getframe(1))
    raise TrainingError(
        f"the ranks met in different collectives, one of them at {at}; each must be called by every rank"
    )


class Guard:
    """Has this rank's collectives noted, tells the other ranks of them, and judges when this rank does not move."""

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._rank, self._size = dist.get_rank(), dist.get_world_size()
        self._main = threading.main_thread().ident or 0
        self._heard = 0  # the last question
        self._mark: Any = None  # where the main thread was
        self._since = time.monotonic()
        # A launcher that starts workers again may keep the store, and what earlier guards wrote there.
        mine = [uuid.uuid4().hex]
        dist.broadcast_object_list(mine)
        # A connection of its own: the process group's may be in the hands of a thread that waits.
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=60))
        self._store = dist.PrefixStore(f"crosstrain/guard/{mine[0]}", store)
        self._recorder = Recorder(self.explain)
        self._let_abort = _delay_abort()
        self._stop = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="collectives", daemon=True)
        self._watcher.start()
        atexit.register(self.close)

    def close(self) -> None:
        atexit.unregister(self.close)
        self._stop.set()
        self._watcher.join(timeout=5)
        self._recorder.close()
        self._let_abort()

    def explain(self, mispaired: str | None = None) -> None:
        """End the run if the ranks' calls show why a collective failed; else return."""
        try:
            states, answered, _ = self._ask(2 * _ANSWERING, REMEMBERED)
            mine = self._state(REMEMBERED)
            problem = mismatch(mine, states, failed=True, mispaired=mispaired) or deadlock(mine, answered, failed=True)
            if problem is not None:
                self._report(TrainingError(problem))
        except RuntimeError:  # the store went with the process that kept it
            return

    # ---- watching

    def _watch(self) -> None:
        due = patience = SETTLED + self._rank // 16  # in a large world not all ask at once
        try:
            while not self._stop.wait(_TICK):
                self._answer()
                still = self._still()
                dying = still >= _TICK and _is_aborting()
                if still < SETTLED and not dying:
                    due = patience
                elif still >= due or dying:
                    # A long step is no hang: asking costs little against the time that training has stood still.
                    self._judge(REMEMBERED if dying or still >= _EARNEST else _FEW)
                    due = self._limit if still < self._limit < 2 * still else 2 * still
        except RuntimeError:  # the store went with the process that kept it
            return

    def _judge(self, depth: int) -> None:
        states, answered, silent = self._ask(_ANSWERING, depth)
        mine = self._state(depth)
        problem = mismatch(mine, states) or deadlock(mine, answered)
        if problem is not None:
            self._report(TrainingError(problem))
        if mine.still >= self._limit and (problem := absence(mine, answered, silent)) is not None:
            # A process that says nothing at all is not one that made another call.
            self._report(RankLost(problem) if silent else TrainingError(problem))

    def _still(self) -> float:
        """For how long the main thread has been at the same instruction, with no collective entered elsewhere."""
        frame = sys._current_frames()[self._main]
        mark = (id(frame), frame.f_lasti, self._recorder.mark(self._main))
        if mark != self._mark:
            self._mark, self._since = mark, time.monotonic()
        return time.monotonic() - self._since

    def _state(self, depth: int) -> State:
        at, caller = whereabouts(sys._current_frames()[self._main])
        waiting, histories = self._recorder.waiting(self._main), self._recorder.histories(self._main, depth)
        return State(self._rank, self._heard, at, caller, self._still(), _is_aborting(), waiting, histories)

    # ---- talking with the other ranks' guards

    def _answer(self) -> None:
        """Say where this rank is, if another has asked; leave, if another has told what is wrong."""
        heard = self._store.add("asked", 0)
        if heard != self._heard:
            self._heard = heard
            if self._store.add("told", 0):
                worker_errors.leave(_LEAVING)
            depth = int(self._store.get("depth"))  # which is set before the first question
            self._store.set(str(self._rank), self._state(depth).dumps())

    def _ask(self, patience: float, depth: int) -> tuple[list[State], list[State], list[int]]:
        """What other ranks have last said of themselves; the same of those that answer now; and which do not.

        They tell of their latest `depth` calls on each group.
        """
        self._store.set("depth", str(depth))
        question, deadline = self._store.add("asked", 1), time.monotonic() + patience
        states: dict[int, State] = {}
        silent = set(range(self._size)) - {self._rank}
        while silent and time.monotonic() < deadline:
            self._answer()
            for rank in sorted(silent):
                if self._store.check([str(rank)]):
                    states[rank] = State.loads(self._store.get(str(rank)))
                    if states[rank].answers >= question:
                        silent.remove(rank)
            if silent:
                time.sleep(0.1)
        answered = [state for state in states.values() if state.rank not in silent]
        return list(states.values()), answered, sorted(silent)

    def _report(self, problem: UserError) -> NoReturn:
        """End the run; of several ranks that have found something out, one tells."""
        if self._store.add("told", 1) > 1:
            worker_errors.leave(_LEAVING)
        worker_errors.tell(problem)
        self._store.set("depth", str(_FEW))
        self._store.add("asked", 1)
        worker_errors.leave(2 * _TICK)  # when the others have heard of it, and none complains of a lost connection


def _delay_abort() -> Callable[[], None]:
    """Let an aborting process live for six more seconds, in which its guard can answer; returns what undoes it.

    gloo aborts, from a thread of its own, where a message is longer than expected. The signal's handler is the C
    library's `sleep`, which takes the signal's number, 6, for its seconds: no Python runs in a broken process.
    """
    if os.name != "posix":
        return lambda: None
    libc = ctypes.CDLL(None)
    handle = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)(("signal", libc))
    before = handle(signal.SIGABRT, ctypes.cast(libc.sleep, ctypes.c_void_p))
    return lambda: handle(signal.SIGABRT, before)


def _is_aborting() -> bool:
    """Whether a thread of gloo's is in the signal handler of `_delay_abort`, where the system tells (Linux)."""
    for task in Path("/proc/self/task").glob("*/status"):
        with suppress(OSError, KeyError):  # a thread that has just ended
            status = dict(line.split(":\t", 1) for line in task.read_text().splitlines() if ":\t" in line)
            if status["Name"].startswith("gloo") and int(status["SigBlk"], 16) >> (signal.SIGABRT - 1) & 1:
                return True
    return False
