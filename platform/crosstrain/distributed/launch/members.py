"""The launcher on node 0: it starts workers, and decides when the ranks meet."""

import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from crosstrain.distributed.launch import membership
from crosstrain.distributed.launch.launch import Launch
from crosstrain.distributed.launch.local_workers import Ended, Event, LocalWorkers
from crosstrain.distributed.launch.machines import Machines
from crosstrain.distributed.launch.worker_errors import AGAIN, Failure, WorkerFailure, failure_of
from crosstrain.utils.errors import RankLost, UserError

_END = 10.0  # seconds for the processes to end after training
_UNEXPLAINED = 3  # epochs in a row that may end without a finished step or the loss of a worker


@dataclass
class _Worker:
    start: int  # its number
    heard: float = float("inf")  # time of the last sign of life; infinite until the first one
    waits: bool = False  # for the next epoch
    part: str | None = None  # of the state, if it waits; None: it holds no state
    done: bool = False
    result: int = 0  # signal that stopped the worker
    error: dict[str, Any] | None = None  # its report of its error
    killed: str = ""  # the reason for which the launcher has killed it


class Members:
    """Starts workers, and begins a new epoch whenever a worker is lost or added.

    sizes: possible numbers of ranks, if workers go on when others are lost; empty: all workers restart. limit: a worker
    is killed after this many seconds without a sign of life, or if it has not left an epoch this many seconds after the
    epoch's end; None: never. stop: signals to stop, which have been forwarded to the workers.
    """

    def __init__(
        self, local: LocalWorkers, how: Launch, stop: list[int], sizes: Sequence[int], limit: float | None
    ) -> None:
        self._local, self._how, self._stop = local, how, stop
        self._machines = Machines(local, how)
        self._goes_on, self._sizes = bool(sizes), sizes or how.world_sizes
        self._limit = limit if limit is not None and sizes else float("inf")
        self._workers: dict[int, _Worker] = {}  # slot -> worker
        self._starts = 0  # number of workers that were started
        self._members: list[int] = []  # slots of the current epoch's workers that are not lost, in rank order
        self._ranks: dict[int, int] = {}  # slot -> rank in the current epoch
        self._number, self._ended = 0, 0.0  # number of the current epoch, and the time of its end; 0: it goes on
        self._store: dist.TCPStore | None = None  # of the current epoch
        self._reason = ""  # for the next epoch
        self._restarts_left, self._charged = how.max_restarts, -1  # number of the last epoch that has cost a restart
        self._unexplained = 0  # epochs that have ended without a finished step or the loss of a worker, in a row
        self._failure: Failure | None = None

    def exit_code(self) -> int:
        """Run until all workers have finished, and return the exit code. Raises the error that ends the run."""
        code: int | str = "another node ended the run; see its output for the reason"
        try:
            self._start(self._machines.slots)
            while not self._is_over():
                for event in self._machines.events():
                    self._take(event)
                self._look_for_hanging()
                if (self._number and self._goes_on) or not self._machines.are_missing():
                    self._regroup()
            signals = [worker.result for worker in self._workers.values() if worker.result]
            code = 128 + (self._stop or signals)[0] if signals or not self._members else 0
            self._local.close(_END if self._members else 0)
        finally:
            self._local.close()
            self._machines.close(code)
        return code

    def _is_over(self) -> bool:
        """Return True if all ranks have finished, or if a signal came while no rank could save.

        When one rank has finished, all have: a rank that lost another after its last step only waits.
        """
        members = [self._workers[slot] for slot in self._members]
        finished = any(worker.done for worker in members) and all(worker.done or worker.waits for worker in members)
        return finished or bool(self._stop and not self._members)

    def _start(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self._starts += 1
            self._machines.order("start", slot, self._starts)
            self._workers[slot] = _Worker(self._starts)

    def _take(self, event: Event) -> None:
        """Take note of a worker's message."""
        worker, value = self._workers.get(event.slot), event.value
        if event.message == "added":
            self._start([event.slot])
            self._reason = self._reason if self._number else value
        elif worker is None or worker.done or event.start not in (0, worker.start):  # 0: the whole machine is lost
            return
        elif event.message == "waiting":
            if value != worker.part:  # the worker has finished a step
                self._unexplained = 0
            worker.waits, worker.part = True, value
        elif event.message == "done":
            worker.done, worker.result = True, value
        elif event.message == "failed":
            worker.error = value
        elif event.message == "ended":
            self._lose(event.slot, value)
        if worker is not None:
            worker.heard = time.monotonic()

    def _look_for_hanging(self) -> None:
        """Kill workers that hang."""
        if not self._ended and any(self._workers[slot].waits for slot in self._members):
            self._ended, self._store = time.monotonic(), None  # a member has lost a connection; so will the others
        now = time.monotonic()
        for slot, worker in self._workers.items():
            late = self._ended and slot in self._members and not worker.waits and now - self._ended > self._limit
            if (late or now - worker.heard > self._limit) and not worker.done and not worker.killed:
                worker.killed = f"rank {self._ranks.get(slot, slot)} gave no sign of life for {self._limit:.0f} s"
                self._machines.order("kill", slot)

    def _lose(self, slot: int, end: Ended) -> None:
        """End the epoch without this worker. Raises its error if the run cannot go on."""
        worker = self._workers.pop(slot)
        failure = failure_of(self._ranks.get(slot, slot), end.code, worker.error, end.machine)
        if reason := worker.killed or end.reason:
            failure = Failure(UserError(f"{reason}; {AGAIN}"), reason)
        if slot in self._members:
            self._members.remove(slot)
            self._ended = self._ended or time.monotonic()
            self._store = None  # so that ranks that still build their groups do not wait for this worker
        if self._stop and end.code in (-signal.SIGUSR1, -signal.SIGTERM):
            return
        if not (failure.lost_another and self._failure):
            self._failure = failure
        if failure.is_final or (self._stop and not self._workers):
            raise failure.error
        if self._goes_on:
            self._go_on(slot, end, failure)
        elif not end.address:  # without a machine, the other ranks may finish, if a signal told all to stop
            self._restart(self._failure or failure)

    def _go_on(self, slot: int, end: Ended, failure: Failure) -> None:
        """Tell the others, and replace the worker if its machine is not lost."""
        for other in self._members:
            self._machines.order("send", other, end.address)
        if not failure.lost_another and self._reason != failure.summary:  # a lost machine has more than one worker
            self._reason = failure.summary
            print(f"note: {self._reason}", file=sys.stderr, flush=True)
        if slot in self._machines.slots:
            if self._charged != self._number and self._restarts_left and not self._stop:
                self._restarts_left, self._charged = self._restarts_left - 1, self._number
            if self._charged == self._number:  # all losses in an epoch cost one restart
                self._start([slot])
        if self._failure and not self._largest(len(self._workers)):
            raise self._failure.error

    def _restart(self, cause: Failure) -> None:
        """Start all workers again. Raises the cause if no restart is left."""
        if not self._restarts_left or self._stop:
            if (most := self._how.max_restarts) and not self._stop:
                print(
                    f"note: run.max_restarts: all {most} restarts are used up, so the run ends",
                    file=sys.stderr,
                    flush=True,
                )
            raise cause.error
        if isinstance(cause.error, WorkerFailure) and not cause.lost_another:
            print(cause.error, file=sys.stderr, flush=True)  # the traceback is not printed anywhere else
        self._restarts_left -= 1
        self._start_all(cause.summary)

    def _start_all(self, reason: str) -> None:
        self._reason, self._failure = reason, None
        self._members, self._workers, self._store = [], {}, None
        self._start(self._machines.slots)

    def _regroup(self) -> None:
        """Begin a new epoch if the current one has ended; end it if more ranks could take part."""
        if any(worker.done for worker in self._workers.values()):  # the others end soon, too
            return
        new = sorted(slot for slot in self._workers if slot not in self._members)
        if all(self._workers[slot].waits for slot in self._members or new):
            # Members come first, so that rank 0 is a worker that has the state.
            slots = self._whole_first() + [slot for slot in new if self._workers[slot].waits]
            if size := self._largest(len(slots)):
                self._begin(slots[:size])
        elif self._members and not self._stop and (not self._ended or not self._goes_on):
            most = self._largest(len(self._members) + sum(self._workers[slot].waits for slot in new))
            if most > len(self._members) and not self._goes_on:
                self._start_all(self._failure.summary if self._failure else "a node joined or left")
            elif most > len(self._members):
                self._reason, self._ended = "a worker was added", time.monotonic()
                for slot in self._members:
                    self._machines.order("send", slot, None)

    def _whole_first(self) -> list[int]:
        """Return the members in an order in which the first ones hold the whole state, if that is possible."""
        parts = [self._workers[slot].part for slot in self._members]
        order = [(part is None, parts[:i].count(part)) for i, part in enumerate(parts)]  # first copies come first
        return [slot for _, slot in sorted(zip(order, self._members, strict=True), key=lambda member: member[0])]

    def _largest(self, workers: int) -> int:
        """The largest possible number of ranks with this many workers; 0: none."""
        return max((size for size in self._sizes if size <= workers), default=0)

    def _begin(self, slots: list[int]) -> None:
        self._unexplained = 0 if self._reason else self._unexplained + 1
        if self._number and not self._reason:
            self._reason = "the workers lost their connections"
        if self._unexplained > _UNEXPLAINED:
            raise RankLost(
                f"the workers lost their connections {_UNEXPLAINED} times, although none of them ended; see their "
                f"output, and check the network interface (GLOO_SOCKET_IFNAME)"
            )
        address = self._machines.address
        self._store = dist.TCPStore(address, 0, is_master=True, wait_for_workers=False)
        self._members, self._ranks, self._ended = slots, {slot: rank for rank, slot in enumerate(slots)}, 0.0
        self._number += 1
        most, how = self._how.max_restarts, f"{len(slots)} ranks go on"
        if not self._goes_on:
            how = f"all ranks restarted (restart {most - self._restarts_left} of {most}) and continue"
        news = f"{self._reason}; {how}" if self._reason else ""
        for rank, slot in enumerate(slots):
            self._workers[slot].waits = False
            epoch = membership.Epoch(self._number, rank, len(slots), address, self._store.port, news)
            self._machines.order("send", slot, epoch)
        self._reason = ""
