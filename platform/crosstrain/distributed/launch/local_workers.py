"""The worker processes of one machine, in a run that goes on when workers are lost."""

import multiprocessing
import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING, Any, NamedTuple

from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from crosstrain.distributed.launch import membership
from crosstrain.distributed.launch.worker_errors import run_worker

if TYPE_CHECKING:  # a real import would be circular: the launcher imports this file
    from crosstrain.distributed.launch.launcher import Launch

_POLL = 0.1  # seconds between looks at workers without events


class Ended(NamedTuple):
    """The end of a worker process."""

    failure: ProcessFailure  # with the exit code, and with the worker's description of its error
    machine: str  # such as " on node7"; empty for a run on one machine
    reason: str = ""  # if the launcher knows it better than the exit code says
    address: str = ""  # of the worker's machine, if that is lost


class _Process(NamedTuple):
    process: BaseProcess
    connection: Connection
    errors: str  # file in which the worker describes its error


class LocalWorkers:
    """Starts worker processes, and reports their messages and their ends.

    A slot is the number of a worker in the run: the node's rank times `nproc_per_node`, plus the local rank.
    """

    def __init__(self, worker: Callable[..., int], args: tuple[Any, ...], how: "Launch", folder: str) -> None:
        self._worker, self._args, self._nproc, self._folder = worker, args, how.nproc_per_node, folder
        self._machine = f" on {socket.gethostname()}" if how.nodes else ""
        self._running: dict[int, _Process] = {}  # slot -> process

    def order(self, action: str, slot: int, *values: Any) -> None:
        """Carry out an order of the launcher on node 0: start, send or kill."""
        if action == "start":
            self._start(slot)
        elif slot in self._running:  # its end may not have been reported yet
            process = self._running[slot]
            with suppress(OSError):
                process.process.kill() if action == "kill" else process.connection.send(*values)

    def _start(self, slot: int) -> None:
        context = multiprocessing.get_context("spawn")
        here, there = context.Pipe()
        errors = f"{self._folder}/{slot}-{time.monotonic_ns()}.json"
        arguments = (self._worker, self._args, there, slot % self._nproc, errors)
        process = context.Process(target=_member, args=arguments)
        process.start()
        there.close()
        self._running[slot] = _Process(process, here, errors)

    def events(self) -> list[tuple[int, str, Any]]:
        """Wait a moment, and return (slot, message, value); the message "ended" has the value Ended."""
        running = self._running.values()
        wait([p.connection for p in running] + [p.process.sentinel for p in running], timeout=_POLL)
        found = list[tuple[int, str, Any]]()
        for slot, (process, connection, errors) in list(self._running.items()):
            ended = not process.is_alive()  # before its messages are read, so that none is missed
            with suppress(EOFError, OSError):
                while connection.poll():
                    found.append((slot, *connection.recv()))
            if ended:
                process.join()
                del self._running[slot]
                failure = ProcessFailure(slot, process.pid or 0, process.exitcode or 0, errors)
                found.append((slot, "ended", Ended(failure, self._machine)))
        return found

    def close(self, seconds: float = 0.0) -> None:
        """Give the processes this time to end by themselves, and kill them."""
        deadline = time.monotonic() + seconds
        for process in self._running.values():
            process.process.join(max(0.0, deadline - time.monotonic()))
            process.process.kill()


def _member(worker: Callable[..., int], args: tuple[Any, ...], connection: Connection, rank: int, errors: str) -> None:
    """Run a worker in its process."""
    os.environ |= {"LOCAL_RANK": str(rank), "TORCHELASTIC_ERROR_FILE": errors}
    membership.current = membership.Membership(connection)
    membership.current.say("done", run_worker(worker, args))
