"""The launcher of a run that goes on in the same processes when a worker is lost."""

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from crosstrain.distributed.launch import membership
from crosstrain.distributed.launch.elastic_agent import environment
from crosstrain.distributed.launch.signals import forwarded
from crosstrain.distributed.launch.worker_errors import Failure, first_failure, run_worker
from crosstrain.utils.errors import RankLost

if TYPE_CHECKING:  # a real import would be circular: the launcher imports this file
    from crosstrain.distributed.launch.launcher import Launch

_POLL = 0.05  # seconds between looks at the workers
_END = 10.0  # seconds for the processes to end after training
_UNEXPLAINED = 3  # epochs in a row that may end without a finished step or the loss of a worker


@dataclass
class _Worker:
    process: BaseProcess
    connection: Connection
    errors: Path  # file in which the worker describes its error
    heard: float = float("inf")  # time of the last sign of life; infinite until the first one
    waits: bool = False  # for the next epoch
    part: str | None = None  # of the state, if it waits; None: it holds no state
    done: bool = False
    result: int = 0  # signal that stopped the worker


class Members:
    """Starts workers, and begins a new epoch whenever a worker is lost or added.

    sizes: possible numbers of ranks. limit: a worker is killed after this many seconds without a sign of life, or if it
    has not left an epoch this many seconds after the epoch's end; None: never.
    """

    def __init__(
        self,
        worker: Callable[..., int],
        args: tuple[Any, ...],
        how: "Launch",
        sizes: Sequence[int],
        limit: float | None,
    ) -> None:
        self._worker, self._args, self._how, self._sizes = worker, args, how, sizes
        self._limit = float("inf") if limit is None else limit
        self._workers: dict[int, _Worker] = {}  # slot -> worker; the slot is also the worker's local rank
        self._members: list[int] = []  # slots of the current epoch's workers that are not lost, in rank order
        self._ranks: dict[int, int] = {}  # slot -> rank in the current epoch
        self._number, self._ended = 0, 0.0  # number of the current epoch, and the time of its end; 0: it goes on
        self._store: dist.TCPStore | None = None  # of the current epoch
        self._reason = ""  # for the next epoch
        self._restarts_left, self._charged = how.max_restarts, -1  # number of the last epoch that has cost a restart
        self._unexplained = 0  # epochs that have ended without a finished step or the loss of a worker, in a row
        self._failure: Failure | None = None
        self._stop: list[int] = []

    def run(self) -> int:
        """Run until all workers have finished, and return the exit code. Raises the error that ends the run."""
        with environment(self._how), TemporaryDirectory(prefix="crosstrain-") as self._folder, forwarded(self._stop):
            try:
                for slot in range(self._how.world_size):
                    self._start(slot)
                while not self._is_over():
                    self._listen()
                    self._look_for_lost()
                    self._regroup()
                for worker in filter(lambda worker: worker.done, self._workers.values()):
                    worker.process.join(_END)
            finally:
                for worker in self._workers.values():
                    worker.process.kill()
        signals = [worker.result for worker in self._workers.values() if worker.result]
        stopped = signals or not self._members
        return 128 + (self._stop or signals)[0] if stopped else 0

    def _is_over(self) -> bool:
        """Return True if all ranks have finished, or if a signal ended all workers before the first epoch.

        When one rank has finished, all have: a rank that lost another after its last step only waits.
        """
        members = [self._workers[slot] for slot in self._members]
        finished = any(worker.done for worker in members) and all(worker.done or worker.waits for worker in members)
        return finished or not self._workers

    def _start(self, slot: int) -> None:
        context = multiprocessing.get_context("spawn")
        here, there = context.Pipe()
        errors = Path(self._folder) / f"{slot}-{time.monotonic_ns()}.json"
        arguments = (self._worker, self._args, there, slot, str(errors))
        process = context.Process(target=_member, args=arguments)
        process.start()
        there.close()
        self._workers[slot] = _Worker(process, here, errors)

    def _listen(self) -> None:
        """Take the workers' messages."""
        running = [worker for worker in self._workers.values() if not worker.done]
        wait([w.connection for w in running] + [w.process.sentinel for w in running], timeout=_POLL)
        for worker in running:
            with suppress(EOFError, OSError):  # the worker has ended
                while worker.connection.poll():
                    message, value = worker.connection.recv()
                    worker.heard = time.monotonic()
                    if message == "waiting":
                        if value != worker.part:  # the worker has finished a step
                            self._unexplained = 0
                        worker.waits, worker.part = True, value
                    elif message == "done":
                        worker.done, worker.result = True, value

    def _look_for_lost(self) -> None:
        """Take note of workers that have ended, and kill those that hang."""
        now = time.monotonic()
        if not self._ended and any(self._workers[slot].waits for slot in self._members):
            self._ended, self._store = now, None  # a member has lost a connection; the others must notice, too
        for slot, worker in list(self._workers.items()):
            late = self._ended and slot in self._members and not worker.waits and now - self._ended > self._limit
            reason = ""
            if worker.process.is_alive() and not worker.done and (late or now - worker.heard > self._limit):
                reason = f"rank {self._ranks.get(slot, slot)} gave no sign of life for {self._limit:.0f} s"
                worker.process.kill()
                worker.process.join()
            if not worker.process.is_alive() and not worker.done:
                self._lose(slot, worker, reason)

    def _lose(self, slot: int, worker: _Worker, reason: str) -> None:
        """End the epoch without this worker. Raises its error if the run cannot go on."""
        worker.process.join()
        del self._workers[slot]
        if slot in self._members:
            self._members.remove(slot)
            self._ended = self._ended or time.monotonic()
            self._store = None  # so that ranks that still build their groups do not wait for this worker
        code = worker.process.exitcode or 0
        failed = ProcessFailure(slot, worker.process.pid or 0, code, str(worker.errors))
        failure = first_failure({self._ranks.get(slot, slot): failed})
        if self._stop and code in (-signal.SIGUSR1, -signal.SIGTERM):
            return
        if not (failure.lost_another and self._failure):
            self._failure = failure
        if failure.is_final or (self._stop and not self._workers):
            raise failure.error
        if not failure.lost_another:
            self._reason = reason or failure.summary
            print(f"note: {self._reason}", file=sys.stderr, flush=True)
        if self._charged != self._number and self._restarts_left and not self._stop:
            self._restarts_left, self._charged = self._restarts_left - 1, self._number
        if self._charged == self._number:  # all losses in an epoch cost one restart
            self._start(slot)
        if not self._largest(len(self._workers)):
            raise self._failure.error

    def _regroup(self) -> None:
        """Begin a new epoch if the current one has ended; ask for its end if more ranks could take part."""
        if any(worker.done for worker in self._workers.values()):  # the others end soon, too
            return
        new = [slot for slot in self._workers if slot not in self._members]
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
                    self._workers[slot].connection.send(None)

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
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._members, self._ranks, self._ended = slots, {slot: rank for rank, slot in enumerate(slots)}, 0.0
        self._number += 1
        for rank, slot in enumerate(slots):
            self._workers[slot].waits = False
            self._workers[slot].connection.send(
                membership.Epoch(self._number, rank, len(slots), self._store.port, self._reason)
            )
        self._reason = ""


def _member(worker: Callable[..., int], args: tuple[Any, ...], connection: Connection, slot: int, errors: str) -> None:
    """Run a worker in its process."""
    os.environ |= {"LOCAL_RANK": str(slot), "TORCHELASTIC_ERROR_FILE": errors}
    membership.current = membership.Membership(connection)
    membership.current.say("done", run_worker(worker, args))
