"""The launcher of a run that goes on in the same processes when a worker is lost."""

import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from crosstrain.distributed.launch import membership
from crosstrain.distributed.launch.elastic_agent import announced
from crosstrain.distributed.launch.local_workers import Ended, LocalWorkers
from crosstrain.distributed.launch.machines import Machines
from crosstrain.distributed.launch.worker_errors import AGAIN, Failure, first_failure
from crosstrain.utils.errors import RankLost, UserError

if TYPE_CHECKING:  # a real import would be circular: the launcher imports this file
    from crosstrain.distributed.launch.launcher import Launch

_END = 10.0  # seconds for the processes to end after training
_UNEXPLAINED = 3  # epochs in a row that may end without a finished step or the loss of a worker


@dataclass
class _Worker:
    heard: float = float("inf")  # time of the last sign of life; infinite until the first one
    waits: bool = False  # for the next epoch
    part: str | None = None  # of the state, if it waits; None: it holds no state
    done: bool = False
    result: int = 0  # signal that stopped the worker
    killed: str = ""  # the reason for which the launcher has killed it


class Members:
    """The agent on node 0. It starts workers, and begins a new epoch whenever a worker is lost or added.

    The first arguments are those of `ElasticAgent`. sizes: possible numbers of ranks. limit: a worker is killed after
    this many seconds without a sign of life, or if it has not left an epoch this many seconds after the epoch's end;
    None: never.
    """

    succeeded = False

    def __init__(
        self,
        worker: Callable[..., int],
        args: tuple[Any, ...],
        how: "Launch",
        restarts_left: int,
        stop: list[int],
        folder: str,
        sizes: Sequence[int],
        limit: float | None,
    ) -> None:
        self._how, self._sizes, self._stop = how, sizes, stop
        self._local = LocalWorkers(worker, args, how, folder)
        self._machines = Machines(self._local, how)
        self._limit = float("inf") if limit is None else limit
        self._workers: dict[int, _Worker] = {}  # slot -> worker
        self._members: list[int] = []  # slots of the current epoch's workers that are not lost, in rank order
        self._ranks: dict[int, int] = {}  # slot -> rank in the current epoch
        self._number, self._ended = 0, 0.0  # number of the current epoch, and the time of its end; 0: it goes on
        self._store: dist.TCPStore | None = None  # of the current epoch
        self._reason = ""  # for the next epoch
        self.restarts_left, self._charged = restarts_left, -1  # number of the last epoch that has cost a restart
        self._unexplained = 0  # epochs that have ended without a finished step or the loss of a worker, in a row
        self._failure: Failure | None = None

    def exit_code(self) -> int:
        """Run until all workers have finished, and return the exit code. Raises the error that ends the run."""
        nodes, code = self._how.nodes, None
        try:
            for slot in range(self._how.nproc_per_node):
                self._start(slot)
            with announced(nodes) if nodes else nullcontext():
                while self._machines.are_missing() and self._workers:
                    self._look()
            while not self._is_over():
                self._look()
                self._regroup()
            signals = [worker.result for worker in self._workers.values() if worker.result]
            stopped = signals or not self._members
            code = 128 + (self._stop or signals)[0] if stopped else 0
            self._local.close(_END)
        finally:
            self._local.close()
            self._machines.close(code)
        return code

    def _is_over(self) -> bool:
        """Return True if all ranks have finished, or if a signal ended all workers before the first epoch.

        When one rank has finished, all have: a rank that lost another after its last step only waits.
        """
        members = [self._workers[slot] for slot in self._members]
        finished = any(worker.done for worker in members) and all(worker.done or worker.waits for worker in members)
        return finished or not self._workers

    def _start(self, slot: int) -> None:
        self._machines.order("start", slot)
        self._workers[slot] = _Worker()

    def _look(self) -> None:
        """Take the workers' messages, and kill workers that hang."""
        for slot, message, value in self._machines.events():
            worker = self._workers.get(slot)
            if message == "added":
                self._start(slot)
            elif worker is not None and not worker.done:
                worker.heard = time.monotonic()
                self._take(slot, worker, message, value)
        if not self._ended and any(self._workers[slot].waits for slot in self._members):
            self._ended, self._store = time.monotonic(), None  # a member has lost a connection; so will the others
        now = time.monotonic()
        for slot, worker in self._workers.items():
            late = self._ended and slot in self._members and not worker.waits and now - self._ended > self._limit
            if (late or now - worker.heard > self._limit) and not worker.done and not worker.killed:
                worker.killed = f"rank {self._ranks.get(slot, slot)} gave no sign of life for {self._limit:.0f} s"
                self._machines.order("kill", slot)

    def _take(self, slot: int, worker: _Worker, message: str, value: Any) -> None:
        if message == "waiting":
            if value != worker.part:  # the worker has finished a step
                self._unexplained = 0
            worker.waits, worker.part = True, value
        elif message == "done":
            worker.done, worker.result = True, value
        elif message == "ended":
            self._lose(slot, value)

    def _lose(self, slot: int, end: Ended) -> None:
        """End the epoch without this worker. Raises its error if the run cannot go on."""
        reason = self._workers.pop(slot).killed or end.reason
        if slot in self._members:
            self._members.remove(slot)
            self._ended = self._ended or time.monotonic()
            self._store = None  # so that ranks that still build their groups do not wait for this worker
            for other in self._members:
                self._machines.order("send", other, membership.Over(end.address))
        failure = first_failure({self._ranks.get(slot, slot): end.failure}, end.machine)
        if reason:
            failure = Failure(UserError(f"{reason}; {AGAIN}"), reason, is_final=False, lost_another=False)
        if self._stop and end.failure.exitcode in (-signal.SIGUSR1, -signal.SIGTERM):
            return
        if not (failure.lost_another and self._failure):
            self._failure = failure
        if failure.is_final or (self._stop and not self._workers):
            raise failure.error
        if not failure.lost_another and self._reason != failure.summary:  # a lost machine has more than one worker
            self._reason = failure.summary
            print(f"note: {self._reason}", file=sys.stderr, flush=True)
        if self._machines.has(slot):
            self._replace(slot)
        if not self._largest(len(self._workers)):
            raise self._failure.error

    def _replace(self, slot: int) -> None:
        """Start a new worker, if a restart is left. All losses in an epoch cost one restart."""
        if self._charged != self._number and self.restarts_left and not self._stop:
            self.restarts_left, self._charged = self.restarts_left - 1, self._number
        if self._charged == self._number:
            self._start(slot)

    def _regroup(self) -> None:
        """Begin a new epoch if the current one has ended; ask for its end if more ranks could take part."""
        if any(worker.done for worker in self._workers.values()):  # the others end soon, too
            return
        new = sorted(slot for slot in self._workers if slot not in self._members)
        if all(self._workers[slot].waits for slot in self._members or new):
            # Members come first, so that rank 0 is a worker that has the state.
            slots = self._whole_first() + [slot for slot in new if self._workers[slot].waits]
            if size := self._largest(len(slots)):
                self._begin(slots[:size])
        elif self._members and not self._ended and not self._stop:
            most = self._largest(len(self._members) + sum(self._workers[slot].waits for slot in new))
            if most > len(self._members):
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
        for rank, slot in enumerate(slots):
            self._workers[slot].waits = False
            epoch = membership.Epoch(self._number, rank, len(slots), address, self._store.port, self._reason)
            self._machines.order("send", slot, epoch)
        self._reason = ""
