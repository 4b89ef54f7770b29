"""The worker processes of one machine."""

import multiprocessing
import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple

from crosstrain.distributed.launch import membership
from crosstrain.distributed.launch.launch import Launch
from crosstrain.distributed.launch.worker_errors import run_worker

_POLL = 0.1  # seconds between looks at workers without events


class Event(NamedTuple):
    """A worker's message, or its end.

    slot: the number of a worker in the run: the node's rank times `nproc_per_node`, plus the local rank.
    """

    slot: int
    start: int  # number of the worker's start; 0: a slot of a machine that has joined or is lost
    message: str
    value: Any = None


class Ended(NamedTuple):
    """The value of the event "ended"."""

    code: int  # exit code
    machine: str = ""  # such as " on node7"; empty for a run on one machine
    reason: str = ""  # the loss of the machine, if it is lost
    address: str = ""  # of the lost machine


class _Process(NamedTuple):
    start: int
    process: BaseProcess
    connection: Connection


class LocalWorkers:
    """Starts worker processes, and reports their messages and their ends.

    goes_on: the workers go on in the same processes when others are lost.
    """

    def __init__(self, worker: Callable[..., int], args: tuple[Any, ...], how: Launch, goes_on: bool) -> None:
        self._worker, self._args, self.how, self.goes_on = worker, args, how, goes_on
        self._machine = f" on {socket.gethostname()}" if how.nodes else ""
        self.running: dict[int, _Process] = {}  # slot -> process
        self.results: list[int] = []  # of workers that have finished: the signal that stopped each, or 0

    def order(self, action: str, slot: int, value: Any) -> None:
        """Carry out an order of the launcher on node 0: start, send or kill."""
        if action == "start":
            self._start(slot, value)
        elif slot in self.running:  # its end may not have been reported yet
            process = self.running[slot]
            with suppress(OSError):
                process.process.kill() if action == "kill" else process.connection.send(value)

    def _start(self, slot: int, start: int) -> None:
        """Start a worker, and kill the one that is still running in its slot."""
        if old := self.running.pop(slot, None):
            old.process.kill()
            old.process.join()
        context = multiprocessing.get_context(self.how.start_method)
        here, there = context.Pipe()
        count = self.how.nproc_per_node
        member = (self.goes_on, slot % count, count, there)
        process = context.Process(target=_member, args=(self._worker, self._args, *member))  # type: ignore[attr-defined]
        process.start()
        there.close()
        self.running[slot] = _Process(start, process, here)

    def events(self) -> list[Event]:
        """Wait a moment for events, and return them."""
        running = self.running.values()
        wait([p.connection for p in running] + [p.process.sentinel for p in running], timeout=_POLL)
        found = list[Event]()
        for slot, (start, process, connection) in list(self.running.items()):
            ended = not process.is_alive()  # before its messages are read, so that none is missed
            with suppress(EOFError, OSError):
                while connection.poll():
                    found.append(Event(slot, start, *connection.recv()))
            if ended:
                process.join()
                del self.running[slot]
                found.append(Event(slot, start, "ended", Ended(process.exitcode or 0, self._machine)))
        self.results += [event.value for event in found if event.message == "done"]
        return found

    def close(self, seconds: float = 0.0) -> None:
        """Give the processes this time to end by themselves, and kill them."""
        deadline = time.monotonic() + seconds
        for process in self.running.values():
            process.process.join(max(0.0, deadline - time.monotonic()))
            process.process.kill()
            process.process.join()


def _member(
    worker: Callable[..., int], args: tuple[Any, ...], goes_on: bool, local_rank: int, nproc_per_node: int,
    connection: Connection,
) -> None:  # fmt: skip
    """Run a worker in its process."""
    os.environ |= {"LOCAL_RANK": str(local_rank), "LOCAL_WORLD_SIZE": str(nproc_per_node)}
    member = membership.Membership(connection)
    membership.current = member if goes_on else None

    def enter_and_work(*args: Any) -> int:
        if not goes_on:
            member.enter()
        return worker(*args)

    member.say("done", run_worker(enter_and_work, args, partial(member.say, "failed")))
