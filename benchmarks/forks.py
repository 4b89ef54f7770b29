"""Training runs whose ranks are forks of this process, which has imported everything, so that they start at once."""

from __future__ import annotations

import multiprocessing
import os
import socket
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path

import torch
import torch.distributed.fsdp
import torch.distributed.tensor
from common import ROOT

from crosstrain import UserError
from crosstrain.config.load import load_config
from crosstrain.training.preflight import preflight
from crosstrain.training.worker import train_worker

_CONTEXT = multiprocessing.get_context("fork")


class Refused(Exception):
    """The run was refused; the message is the sentence for the user."""


def train(
    project: Path,
    options: Sequence[str],
    ranks: int,
    seconds: float = 600,
    killed_when: Callable[[], bool] | None = None,
) -> bool:
    """Train on `ranks` forks with one thread each, and return True, or False if they were killed.

    killed_when: called every few milliseconds; if it returns True, all ranks are killed with SIGKILL. Raises Refused if
    the platform refuses the options, and RuntimeError with the traceback of the first rank that fails, or if the run
    takes more than `seconds`.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    pipes = [_CONTEXT.Pipe(duplex=False) for _ in range(ranks)]
    processes = [
        _CONTEXT.Process(target=_rank, args=(sender, rank, ranks, port, project, options))
        for rank, (_, sender) in enumerate(pipes)
    ]
    for process, (_, sender) in zip(processes, pipes, strict=True):
        process.start()
        sender.close()
    try:
        return _wait([receiver for receiver, _ in pipes], time.monotonic() + seconds, killed_when)
    finally:
        for process in processes:
            process.kill()
            process.join()


def _wait(receivers: list[Connection], deadline: float, killed_when: Callable[[], bool] | None) -> bool:
    while receivers:
        for receiver in wait(receivers, timeout=0.01):
            assert isinstance(receiver, Connection)
            receivers.remove(receiver)
            try:
                refusal, problem = receiver.recv()
            except EOFError:
                raise RuntimeError("a rank died") from None
            if refusal:
                raise Refused(refusal)
            if problem:
                raise RuntimeError(problem)
        if killed_when is not None and killed_when():
            return False
        if time.monotonic() > deadline:
            raise RuntimeError("the ranks did not end in time")
    return True


def _rank(sender: Connection, rank: int, ranks: int, port: int, project: Path, options: Sequence[str]) -> None:
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip
    os.chdir(ROOT)
    torch.set_num_threads(1)
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, 1)
    os.dup2(devnull, 2)
    try:
        config = load_config(project, list(options))
        if rank == 0:
            preflight(config, ranks, dry=False, fresh=False)
        train_worker(config.plain, True)
        sender.send((None, None))
    except UserError as error:
        sender.send((str(error), None))
    except BaseException:
        sender.send((None, traceback.format_exc()))
    os._exit(0)
