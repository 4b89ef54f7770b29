"""A watchdog for collectives that some ranks never enter.

Such a collective hangs, fails with an obscure error, or meets a different call of the same size and exchanges wrong
data. The watchdog records every collective called from Python on every rank. When training is idle, the watchdog's
thread collects a report from every rank through the launcher's store. The watchdog ends the run with a one-sentence
error if the ranks' calls do not match, or if a rank does not enter the collective.
"""

import atexit
import os
import sys
import threading
import time
import uuid
from contextlib import suppress
from datetime import timedelta
from typing import Any, NoReturn

import torch.distributed as dist

from crosstrain.distributed import group
from crosstrain.distributed.launch import worker_errors
from crosstrain.distributed.watchdog.diagnosis import SETTLED, describe_mute, find_absent, find_deadlock, find_desync
from crosstrain.distributed.watchdog.flight_recorder import MAX_CALLS, FlightRecorder, RankReport, locate
from crosstrain.distributed.watchdog.torch_hooks import delay_abort, is_aborting
from crosstrain.utils.errors import RankLost, TrainingError, UserError
from crosstrain.utils.logging import log

_POLL = 0.5  # polling interval in seconds
_ANSWER = 1.5  # time limit for the other ranks' reports, in seconds
_FEW_CALLS = 64  # calls per group in the first reports
_ALL_CALLS_AFTER = 3 * SETTLED  # idle seconds after which reports hold all recorded calls
_EXIT_DELAY = 5.0  # seconds until other ranks exit; the rank with the error exits first, so that the launcher blames it

_watchdog: "Watchdog | None" = None


def install(limit: float | None, tells_lost: bool = True) -> None:
    """Start watching the collectives of this process, if there are other ranks. Collective.

    limit: the run ends if a rank enters a collective this many seconds later than the others. None: no watchdog.
    tells_lost: False: lost ranks are somebody else's concern, so a failed collective is not explained.
    """
    global _watchdog
    remove()
    if limit is not None and dist.get_world_size() > 1:
        try:
            _watchdog = Watchdog(limit, tells_lost)
        except RuntimeError as error:
            log.warning("collectives are not watched, because the ranks' store cannot be reached (%s)", error)


def remove() -> None:
    """Stop watching. Call this function when all ranks are about to exit."""
    global _watchdog
    if _watchdog is not None:
        _watchdog.close()
        _watchdog = None


def seconds_waited() -> float:
    """Return the seconds for which this process has waited for other ranks, on CPUs; 0 without a watchdog."""
    return _watchdog.recorder.waited if _watchdog else 0.0


def add_wait(seconds: float) -> None:
    """Count a wait that the watchdog cannot notice, because it happens outside of Python."""
    if _watchdog:
        _watchdog.recorder.waited += seconds


class Watchdog:
    """Records this rank's collectives, reports them to other ranks, and looks for a mismatch if training is idle."""

    def __init__(self, limit: float, tells_lost: bool) -> None:
        self._limit, self._tells_lost = limit, tells_lost
        self._rank, self._size = dist.get_rank(), dist.get_world_size()
        self._main = threading.main_thread().ident or 0
        self._question = 0  # sequence number of the latest report request that this rank received
        self._progress: Any = None  # last position of the main thread
        self._moved = time.monotonic()
        self._mute: set[int] | None = None  # ranks without an answer since training became idle; None: not asked yet
        # A launcher may keep the store across restarts, with values of earlier watchdogs.
        name = [uuid.uuid4().hex]
        dist.broadcast_object_list(name)
        # The watchdog has its own connection, because a waiting thread may block the process group's connection.
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=60))
        self._store = dist.PrefixStore(f"crosstrain/watchdog/{name[0]}", store)
        self.recorder = FlightRecorder(self._explain)
        group.desync_handler = lambda process_group: self._explain(process_group.group_name)
        self._undo_delay = delay_abort()
        self._answers = 0  # number of answers of the store
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="collectives", daemon=True)
        self._thread.start()
        threading.Thread(target=self._guard, name="store", daemon=True).start()
        atexit.register(self.close)

    def close(self) -> None:
        atexit.unregister(self.close)
        self._stop.set()
        self._thread.join(timeout=5)
        group.desync_handler = None
        self.recorder.close()
        self._undo_delay()

    def _explain(self, desynced: str | None = None) -> None:
        """End the run if the ranks' calls explain a failed collective. desynced: a group with mismatched calls."""
        if not self._tells_lost and desynced is None:
            return
        with suppress(RuntimeError):  # the process that hosts the store has ended
            self._diagnose(MAX_CALLS, failed=True, desynced=desynced)

    def _watch(self) -> None:
        due = patience = SETTLED + self._rank // 16  # staggered, so that not all ranks of a large run ask at once
        with suppress(RuntimeError):  # the process that hosts the store has ended
            while not self._stop.wait(_POLL):
                self._answer()
                idle = self._idle_seconds()
                dying = idle >= _POLL and is_aborting()
                if idle < SETTLED and not dying:
                    due, self._mute = patience, None
                elif idle >= due or dying:
                    # The step may just be long, but asking costs little compared with the idle time.
                    self._diagnose(MAX_CALLS if dying or idle >= _ALL_CALLS_AFTER else _FEW_CALLS)
                    due = self._limit if idle < self._limit < 2 * idle else 2 * idle

    def _guard(self) -> None:
        """End this rank if the store does not answer: its process is frozen, and calls would wait for it without end.

        Counts polls, not seconds, because this process may have been suspended, too.
        """
        silent, before = 0, -1
        while silent * _POLL < self._limit and not self._stop.wait(_POLL):
            silent, before = silent + 1 if self._answers == before else 0, self._answers
        if not self._stop.is_set() and self._thread.is_alive():
            host = "the process that hosts the ranks' store (rank 0, or its launcher)"
            worker_errors.report_error(RankLost(f"{host} did not answer for {self._limit:.0f} s"))
            worker_errors.exit_silently(2 * _POLL)

    def _diagnose(self, depth: int, *, failed: bool = False, desynced: str | None = None) -> None:
        reports, answered, silent = self._ask(2 * _ANSWER if failed else _ANSWER, depth)
        self._mute = {*silent} if self._mute is None else self._mute & {*silent}
        mine = self._report(depth)
        problem = find_desync(mine, reports, failed=failed, desynced=desynced)
        problem = problem or find_deadlock(mine, answered, failed=failed)
        if any(report.aborting for report in (mine, *answered)):  # there is no time to wait for the others
            problem = problem or find_absent(mine, answered, silent=[])
        if problem:
            self._end_run(TrainingError(problem))
        late = mine.idle_seconds >= self._limit and not failed and (self._tells_lost or not silent)
        mute = describe_mute(mine, sorted(self._mute)) if self._mute else None
        if late and (problem := find_absent(mine, answered, silent) or mute):
            # A process that does not answer is probably lost, and not in a different collective.
            self._end_run(RankLost(problem) if silent else TrainingError(problem))

    def _idle_seconds(self) -> float:
        """Return the seconds since the main thread last made progress or any thread entered a collective."""
        frame = sys._current_frames()[self._main]
        progress = (id(frame), frame.f_lasti, self.recorder.progress(self._main))
        if progress != self._progress:
            self._progress, self._moved = progress, time.monotonic()
        return time.monotonic() - self._moved

    def _report(self, depth: int) -> RankReport:
        location, external_caller = locate(sys._current_frames()[self._main])
        waiting, histories = self.recorder.waiting(self._main), self.recorder.histories(self._main, depth)
        idle, aborting = self._idle_seconds(), is_aborting()
        return RankReport(self._rank, self._question, location, external_caller, idle, aborting, waiting, histories)

    # ---- messages between the ranks' watchdogs

    def _answer(self) -> None:
        """Answer the latest request for reports; exit if a rank has ended the run."""
        question = self._store.add("question", 0)
        self._answers += 1
        if question != self._question:
            self._question = question
            if self._store.add("ended", 0):
                worker_errors.exit_silently(_EXIT_DELAY)
            depth = int(self._store.get("depth"))  # set before the first request
            self._store.set(str(self._rank), self._report(depth).dumps())  # type: ignore[arg-type]  # bytes also work

    def _ask(self, seconds: float, depth: int) -> tuple[list[RankReport], list[RankReport], list[int]]:
        """Ask the other ranks for reports with their latest `depth` calls on each group.

        Returns the latest report of each rank, the reports that answer this request, and the ranks without an answer.
        """
        self._store.set("depth", str(depth))
        question, deadline = self._store.add("question", 1), time.monotonic() + seconds
        reports: dict[int, RankReport] = {}
        silent = set(range(self._size)) - {self._rank}
        while silent and time.monotonic() < deadline:
            self._answer()
            for rank in sorted(silent):
                if self._store.check([str(rank)]):
                    reports[rank] = RankReport.loads(self._store.get(str(rank)))
                    if reports[rank].question >= question:
                        silent.remove(rank)
            if silent:
                time.sleep(0.1)
        answered = [report for report in reports.values() if report.rank not in silent]
        return list(reports.values()), answered, sorted(silent)

    def _end_run(self, problem: UserError) -> NoReturn:
        """End the run; if several ranks find a problem, only the first of them reports its problem."""
        if self._store.add("ended", 1) > 1:
            worker_errors.exit_silently(_EXIT_DELAY)
        worker_errors.report_error(problem)
        self._store.set("depth", str(_FEW_CALLS))
        self._store.add("question", 1)
        worker_errors.exit_silently(2 * _POLL)  # by then, the other ranks no longer report lost connections
