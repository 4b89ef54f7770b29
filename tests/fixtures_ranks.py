"""Ranks as forks of a server that has imported everything: they start in a moment, where a fresh process takes seconds.

What such a rank runs is what a launched one runs; only the launcher is left out.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from conftest import Run

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["fixtures_preload"])


def forked(target: Callable[..., None], args: tuple[Any, ...]) -> BaseProcess:
    """A process that the server forks when it is started."""
    with pytest.MonkeyPatch.context() as patch:  # before 3.12.8, Python does not hand its path to the server
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        forkserver.ensure_running()
    return _context.Process(target=target, args=args)  # type: ignore[attr-defined]


def mostly_slow(values: Iterable[Any], quick: Iterable[Any]) -> list[Any]:
    """Parameters of a test, of which only the `quick` ones run every time."""
    kept = list(quick)
    return [value if value in kept else pytest.param(value, marks=pytest.mark.slow) for value in values]


def run_ranks(size: int, function: Callable[..., Any], *args: Any, seconds: float = 120) -> list[Any]:
    """`function(*args)` on `size` ranks with torch's environment set; every rank's result.

    `function` must be importable. Fails with the output of the first rank that fails, and after `seconds`.
    """
    port = free_port()
    pipes = [_context.Pipe(duplex=False) for _ in range(size)]
    ranks = [forked(_rank, (pipes[rank][1], rank, size, port, function, args)) for rank in range(size)]
    for process in ranks:
        process.start()
    for _, sender in pipes:
        sender.close()
    deadline, results = time.monotonic() + seconds, {}
    try:
        while len(results) < size:
            for rank, (receiver, _) in enumerate(pipes):
                if rank not in results and receiver.poll(0.002):
                    try:
                        results[rank], problem = receiver.recv()
                    except EOFError:
                        problem = f"died (exit code {ranks[rank].exitcode})"
                    assert problem is None, f"rank {rank}: {problem}"
            assert time.monotonic() < deadline, f"ranks {sorted(set(range(size)) - set(results))} did not end in time"
    except AssertionError:
        for process in ranks:
            process.kill()
        raise
    finally:
        for process in ranks:
            process.join()
    return [results[rank] for rank in range(size)]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def rank_environment(rank: int, size: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
    }


def _rank(
    sender: Connection, rank: int, size: int, port: int, function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    import torch

    os.environ |= rank_environment(rank, size, port)
    torch.set_num_threads(1)
    try:
        with open(os.devnull, "w") as devnull, contextlib.redirect_stdout(devnull):
            sender.send((function(*args), None))
    except BaseException:
        sender.send((None, traceback.format_exc()))
        os._exit(1)
    sys.stderr.flush()
    os._exit(0)  # like a worker's end, without waiting for threads of libraries


def train(project: Path, name: str, *options: str, size: int = 1) -> Run:
    """Train `project` in the folder `name` beside it, on `size` ranks."""
    folder = project.parent / name
    run_ranks(size, _train, str(project), (f"run.output_dir={folder}", *options))
    return Run(folder)


def _train(project: str, options: tuple[str, ...]) -> int:
    from crosstrain.config.load import load_config
    from crosstrain.training.worker import train_worker

    os.chdir(Path(project).parent)
    return train_worker(load_config(project, options).plain, True)


def make_trainer(project: str, options: tuple[str, ...], *, bare: bool = False) -> Any:
    """For functions that ranks run: a trainer of `project`, its runner set up; bare: steps are only computed."""
    from crosstrain.config.load import load_config
    from crosstrain.distributed.launch.signals import StopRequest
    from crosstrain.engine.build import make_runner
    from crosstrain.training.bad_steps import BadSteps
    from crosstrain.training.worker import build_trainer

    config = load_config(project, options)
    runner = make_runner(config)
    runner.setup()
    hooks: Any = {"hooks_before": {"bad_steps": BadSteps}, "hooks_after": {}} if bare else {}
    return build_trainer(config, runner, StopRequest(True), **hooks)


def begin(project: str, folder: str, steps: int) -> tuple[dict[str, Any], list[list[dict[str, Any]]]]:
    """For functions that ranks run: the initial weights without padding, and the micro batches of each step."""
    trainer = make_trainer(project, (f"run.output_dir={folder}",))
    stream, weights = trainer.batches(), trainer.runner.model.weights
    data = [[{k: v.numpy() for k, v in micro.data.items()} for micro in next(stream)] for _ in range(steps)]
    shapes = {name: weights.logical_shape(name, p.shape) for name, p in weights.parameters().items()}
    initial = {n: p.detach()[tuple(map(slice, shapes[n]))].numpy() for n, p in weights.parameters().items()}
    trainer.runner.close()
    return initial, data
