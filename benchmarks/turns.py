"""Contestants that run side by side and take turns. Each contestant has its own ranks, as processes.

Hooks, threads and global engine state of one contestant do not affect the others, although their steps are only moments
apart. Outside of their turns, processes are stopped, with all their threads.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import socket
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection, wait
from typing import Any
from unittest.mock import patch

from common import Result

_STIR = 0.2  # seconds before a turn, so that stopped threads can catch up


class Line:
    """A rank's end of the connection: it receives orders and sends results."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    def report(self, result: Result) -> None:
        """Send the result of the last order; before the first order, report that this rank is ready."""
        self.connection.send(result)

    def order(self) -> Any:
        """Return the next order; None if there are no more orders."""
        try:
            return self.connection.recv()
        except EOFError:
            return None


class Contestant:
    """Ranks that run `work(line, *args)`; `work` must be importable. The constructor waits until they are ready."""

    def __init__(self, work: Callable[..., None], *args: Any, ranks: int, env: dict[str, str]) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        env = env | {
            "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "GLOO_SOCKET_IFNAME": "lo",
            "HF_HUB_OFFLINE": "1",
        }
        context = multiprocessing.get_context("spawn")
        self._processes, self._lines = [], []
        for rank in range(ranks):
            ours, theirs = context.Pipe()
            process = context.Process(target=_rank, args=(theirs, work, args))
            with patch.dict(os.environ, env | {"RANK": str(rank), "LOCAL_RANK": str(rank)}):
                process.start()  # in this environment, because torch reads it at import
            theirs.close()
            self._processes.append(process)
            self._lines.append(ours)
        self._answers()
        self._signal(signal.SIGSTOP)

    def turn(self, order: Any) -> Result:
        """Have every rank carry out `order`, and return the maximum of each number over the ranks."""
        self._signal(signal.SIGCONT)
        time.sleep(_STIR)
        for line in self._lines:
            line.send(order)
        answers = self._answers()
        self._signal(signal.SIGSTOP)
        return {key: max(answer[key] for answer in answers) for key in answers[0]}

    def _signal(self, number: signal.Signals) -> None:
        for process in self._processes:
            if process.pid is not None and process.is_alive():
                os.kill(process.pid, number)

    def _answers(self) -> list[Result]:
        answers: list[Result] = []
        waiting = list(self._lines)
        while waiting:
            ready = wait(waiting)
            for line in [line for line in waiting if line in ready]:
                try:
                    answers.append(line.recv())
                except (EOFError, ConnectionResetError):
                    self._kill()
                    raise SystemExit("a rank failed; what it said is above") from None
                waiting.remove(line)
        return answers

    def close(self) -> None:
        """Let all ranks end together."""
        self._signal(signal.SIGCONT)
        for line in self._lines:
            line.close()
        for process in self._processes:
            process.join(timeout=60)
        self._kill()

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()


def race(sides: Iterable[tuple[str, Contestant]], order: Any, turns: int, warm_up: int = 2) -> dict[str, list[float]]:
    """Return the seconds of each contestant's turns after the first `warm_up` turns; the order of contestants changes.

    `sides` creates the contestants; all of them are closed at the end.
    """
    line: list[tuple[str, Contestant]] = []
    seconds: dict[str, list[float]] = defaultdict(list)
    try:
        line.extend(sides)
        for number in range(warm_up + turns):
            results = {name: side.turn(order) for name, side in (line[::-1] if number % 2 else line)}
            losses = [result["loss"] for result in results.values()]
            if max(losses) / min(losses) > 1.001:
                raise SystemExit(f"they do not train the same: losses {losses}")
            for name, result in results.items():
                seconds[name] += [result["seconds"]] * (number >= warm_up)
            print({name: round(result["seconds"], 3) for name, result in results.items()}, file=sys.stderr, flush=True)
    finally:
        for _, side in line:
            side.close()
    return seconds


def _rank(connection: Connection, work: Callable[..., None], args: tuple[Any, ...]) -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: otherwise a stopped process would stay
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    work(Line(connection), *args)
