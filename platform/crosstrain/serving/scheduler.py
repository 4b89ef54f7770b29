"""Who is computed when. Rank 0 decides; every rank computes the same."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from torch import Tensor

from crosstrain.distributed.group import Group
from crosstrain.serving.api_error import Refusal
from crosstrain.serving.batch import Rows, Tick
from crosstrain.serving.jobs import Finish, Growth, Job
from crosstrain.serving.limits import Limits
from crosstrain.utils.errors import UserError, sentence

log = logging.getLogger("crosstrain")

_BEAT = 1.0  # seconds between signs of life, which the ranks that follow wait for


class Engine:
    """Computes jobs, first come, first served. `submit` and `cancel` may be called from any thread."""

    def __init__(self, rows: Rows, group: Group, tokenizer: Any, limits: Limits) -> None:
        self._rows, self._group, self._tokenizer, self._limits = rows, group, tokenizer, limits
        self._waiting: deque[Job] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._free = list(range(limits.batch))[::-1]
        self._running: dict[int, Growth] = {}  # by row
        self._next: dict[int, int] = {}  # row: the token that it grows by
        self._let_go: list[int] = []  # rows that the other ranks do not yet know to be free
        self._seconds = 1.0  # that completions have lately taken

    def submit(self, jobs: list[Job]) -> None:
        """Take on all of these, or none: Refusal 429 where too many wait already, 503 where the server stops."""
        with self._changed:
            if self._closed:
                raise Refusal(503, "the server is stopping", code="stopping", retry=10)
            waiting = sum(job.rows for job in self._waiting)
            if waiting and waiting + sum(job.rows for job in jobs) > self._limits.waiting:
                rounds = waiting / self._limits.batch
                raise Refusal(
                    429, f"{waiting} completions wait already; try again later", code="too_many_requests",
                    retry=max(1, min(600, round(rounds * self._seconds))),
                )  # fmt: skip
            self._waiting.extend(jobs)
            self._changed.notify()

    def cancel(self, jobs: list[Job]) -> None:
        """Nobody waits for these any more; their places become free."""
        with self._changed:
            for job in jobs:
                job.cancelled = True
            self._changed.notify()

    @property
    def busy(self) -> tuple[int, int]:
        """Completions that are computed, and that wait."""
        return len(self._running), sum(job.rows for job in list(self._waiting))

    # ---- the thread that computes

    def run(self, stopping: Callable[[], bool]) -> None:
        """Serve until `stopping`; then refuse what is new, and finish what is there while the grace lasts."""
        grace = None
        while True:
            if grace is None and stopping():
                grace = time.monotonic() + self._limits.finish_seconds
                with self._changed:
                    self._closed = True
            if grace is not None and (time.monotonic() > grace or not (self._running or self._waiting)):
                break
            self._turn()
        self._drop(lambda job: True, Refusal(503, "the server is stopping", code="stopping", retry=10))
        self._group.broadcast(Tick(stop=True))

    def _turn(self) -> None:
        late = Refusal(504, f"not done within {self._limits.seconds:g} seconds", code="timeout")
        self._drop(lambda job: job.cancelled or job.overdue, late)
        started = self._admit()
        tick = Tick(False, self._let_go, [(rows, job.sample) for rows, job in started], self._next)
        if not (started or self._next or self._let_go):
            with self._changed:
                if not self._waiting:
                    self._changed.wait(_BEAT)
                idle = not self._waiting
            if idle:
                self._group.broadcast(tick)
            return
        self._group.broadcast(tick)
        self._let_go, tokens, self._next = [], self._next, {}
        for row in tick.freed:
            self._rows.free(row)
        self._free += tick.freed[::-1]
        for rows, job in started:
            self._start(rows, job)
        if tokens:
            try:
                grown = self._rows.step(tokens)
            except Exception as error:
                self._failed(lambda job: True, error)
                return
            for row, logits in grown.items():
                self._grow(row, logits)

    def _admit(self) -> list[tuple[list[int], Job]]:
        """Jobs for which there are rows, in the order in which they came."""
        started = []
        with self._changed:
            while self._waiting and self._waiting[0].rows <= len(self._free):
                job = self._waiting.popleft()
                started.append(([self._free.pop() for _ in range(job.rows)], job))
        return started

    def _start(self, rows: list[int], job: Job) -> None:
        for row, number in zip(rows, job.completions, strict=True):
            self._running[row] = Growth(job, number, self._tokenizer)
        try:
            logits = self._rows.start(rows, job.sample)
        except UserError as error:  # which all ranks raise alike
            self._drop(lambda other: other is job, Refusal(400, sentence(error), code="invalid_value"))
            return
        except Exception as error:
            self._failed(lambda other: other is job, error)
            return
        for row in rows:
            self._grow(row, logits)

    def _grow(self, row: int, logits: Tensor) -> None:
        growth = self._running[row]
        try:
            token = growth.advance(logits)
        except Exception as error:  # such as logits that are not numbers; the others go on
            log.exception("a completion failed")
            growth.job.deliver(_broken(error))
            growth.job.cancelled = True
            return
        if token is None:
            self._seconds = 0.9 * self._seconds + 0.1 * (time.monotonic() - growth.begun)
            self._release(row)
        else:
            self._next[row] = token

    def _failed(self, which: Callable[[Job], bool], error: Exception) -> None:
        """Go on without what failed, for memory, say; with other ranks, which may not have failed, end."""
        if self._group.size > 1:
            raise error
        log.exception("a forward failed")
        running = {growth.job for growth in self._running.values()}
        self._drop(lambda job: job in running and which(job), _broken(error))

    def _release(self, row: int) -> None:
        del self._running[row]
        self._next.pop(row, None)
        self._let_go.append(row)

    def _drop(self, which: Callable[[Job], bool], why: Refusal) -> None:
        """Leave jobs off, and say why to those who wait."""
        dropped = []
        for row, growth in list(self._running.items()):
            if which(growth.job):
                dropped.append(growth.job)
                self._release(row)
        with self._changed:
            dropped += [job for job in self._waiting if which(job)]
            if dropped:
                self._waiting = deque(job for job in self._waiting if not which(job))
        for job in dict.fromkeys(dropped):
            if not job.cancelled:
                job.cancelled = True
                job.deliver(why)


def _broken(error: Exception) -> Refusal:
    return Refusal(500, f"the completion failed: {sentence(error)}", code="failed")


def finished_at_once(job: Job) -> bool:
    """Whether nothing has to be computed for a job; then says so."""
    if job.max_new_tokens or job.score_prompt:
        return False
    for choice in job.completions.values():
        job.deliver(Finish(choice, "length", 0))
    return True
