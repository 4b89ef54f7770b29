"""Continuous batching: rank 0 plans each step, and every rank computes it."""

import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from torch import Tensor

from crosstrain import Group, Sample, UserError, log, sentence
from crosstrain.inference.decoder import Decoder

from .api_error import ApiError
from .jobs import Job
from .limits import Limits

_BEAT = 1.0  # seconds between heartbeats to idle followers


@dataclass
class StepPlan:
    """The next step of all ranks; each rank applies the fields in the order below."""

    stop: bool = False
    freed: list[int] = field(default_factory=list)  # slots to free
    started: dict[int, Sample] = field(default_factory=dict)  # slot -> the prompt to start in it
    tokens: dict[int, int] = field(default_factory=dict)  # slot -> the token to add


def run_follower(decoder: Decoder, group: Group) -> None:
    """Compute the steps that rank 0 plans, until rank 0 stops. Collective."""
    while not (plan := group.broadcast(StepPlan())).stop:
        for slot in plan.freed:
            decoder.free(slot)
        for slot, prompt in plan.started.items():
            with suppress(UserError):  # every rank raises this error; rank 0 reports it
                decoder.start([slot], prompt)
        if plan.tokens:
            decoder.step(plan.tokens)


class Scheduler:
    """Runs jobs in order of arrival. `submit` and `cancel` may be called from any thread."""

    def __init__(self, decoder: Decoder, group: Group, limits: Limits) -> None:
        self._decoder, self._group, self._limits = decoder, group, limits
        self._waiting: deque[Job] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._running: dict[int, Job] = {}  # slot -> job
        self._plan = StepPlan()  # the part of the next step that is already known

    def submit(self, jobs: list[Job]) -> None:
        """Accept all of these jobs or none.

        Raises ApiError 429 if too many jobs are waiting, and 503 if the server is stopping.
        """
        with self._changed:
            if self._closed:
                raise _stopping()
            waiting = len(self._waiting)
            if waiting and waiting + len(jobs) > self._limits.waiting:
                raise ApiError(
                    429, f"{waiting} completions are already waiting; try again later", code="too_many_requests"
                )
            self._waiting.extend(jobs)
            self._changed.notify()

    def cancel(self, jobs: list[Job]) -> None:
        """Cancel the jobs of a client that has disconnected, and free their slots."""
        with self._changed:
            for job in jobs:
                job.cancelled = True
            self._changed.notify()

    @property
    def busy(self) -> tuple[int, int]:
        """Numbers of running and of waiting completions."""
        return len(self._running), len(self._waiting)

    # ---- the computing thread

    def run(self, stopping: Callable[[], bool]) -> None:
        """Serve until `stopping` returns True; then refuse new jobs, and finish the others within `finish_seconds`."""
        while not stopping():
            self._step()
        with self._changed:
            self._closed = True
        end = time.monotonic() + self._limits.finish_seconds
        while (self._running or self._waiting) and time.monotonic() < end:
            self._step()
        self._drop([*self._running.values(), *self._waiting], _stopping())
        self._group.broadcast(StepPlan(stop=True))

    def _step(self) -> None:
        with self._changed:
            known = [*self._running.values(), *self._waiting]
        if late := [job for job in known if job.cancelled or time.monotonic() > job.deadline]:
            self._drop(
                late,
                ApiError(504, f"the completion did not finish within {self._limits.seconds:g} seconds", code="timeout"),
            )
        plan = self._plan
        with self._changed:
            free = [slot for slot in range(self._limits.batch) if slot not in self._running]
            started = {slot: self._waiting.popleft() for slot in free[: len(self._waiting)]}
        plan.started = {slot: job.sample for slot, job in started.items()}
        if not (plan.freed or plan.started or plan.tokens):
            with self._changed:
                if self._waiting or self._changed.wait(_BEAT):
                    return
        self._group.broadcast(plan)
        self._plan = StepPlan()
        for slot in plan.freed:
            self._decoder.free(slot)
        for slot, job in started.items():
            self._start(slot, job)
        if plan.tokens:
            try:
                logits = self._decoder.step(plan.tokens)
            except Exception as error:
                self._failed(list(self._running.values()), error)
            else:
                for slot, row in logits.items():
                    self._advance(slot, row)

    def _start(self, slot: int, job: Job) -> None:
        self._running[slot] = job
        try:
            logits = self._decoder.start([slot], job.sample)
        except UserError as error:  # every rank raises this error
            self._drop([job], ApiError(400, sentence(error), code="invalid_value"))
        except Exception as error:
            self._failed([job], error)
        else:
            self._advance(slot, logits)

    def _advance(self, slot: int, logits: Tensor) -> None:
        job = self._running[slot]
        try:
            token = job.advance(logits)
        except Exception as error:  # such as NaN logits; the other jobs go on
            log.exception("a completion failed")
            job.fail(_broken(error))
            return
        if token is None:
            self._release(slot)
        else:
            self._plan.tokens[slot] = token

    def _failed(self, jobs: list[Job], error: Exception) -> None:
        """Drop the jobs of a failed forward (out of memory, for example). With several ranks, raise the error.

        The ranks may no longer agree, because the forward may have succeeded on other ranks.
        """
        if self._group.size > 1:
            raise error
        log.exception("a forward failed")
        self._drop(jobs, _broken(error))

    def _release(self, slot: int) -> None:
        del self._running[slot]
        self._plan.tokens.pop(slot, None)
        self._plan.freed.append(slot)

    def _drop(self, jobs: list[Job], why: ApiError) -> None:
        """Stop jobs, and send the error to clients that are still waiting."""
        for slot in [slot for slot, job in self._running.items() if job in jobs]:
            self._release(slot)
        with self._changed:
            self._waiting = deque(job for job in self._waiting if job not in jobs)
        for job in jobs:
            if not job.cancelled:
                job.fail(why)


def _stopping() -> ApiError:
    return ApiError(503, "the server is stopping", code="stopping")


def _broken(error: Exception) -> ApiError:
    return ApiError(500, f"the completion failed: {sentence(error)}", code="failed")
