"""One command, N workers.

Run plainly, the program starts one worker per visible GPU (one on a CPU) through torch's elastic launcher; a single
worker runs in this very process. Run by torchrun, srun or mpirun, it is a worker already and joins the others.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from crosstrain.errors import ConfigError, UserError, sentence

_launcher_shows_errors = False  # whether `launch` started this process


@dataclass(frozen=True)
class Launch:
    """How this process becomes workers."""

    world_size: int
    starts_workers: bool  # this process starts them with torch's elastic launcher
    joined: bool  # torchrun, srun or mpirun started it, among others
    is_first: bool  # this process is the launcher, the only worker, or rank 0

    @staticmethod
    def detect(nproc_per_node: int | None, device: str) -> Launch:
        """From the environment, or else from `nproc_per_node` and the GPUs that are visible."""
        joined = _joined_environment(os.environ)
        if joined is not None:
            if nproc_per_node is not None:
                raise ConfigError(
                    "--nproc-per-node: the workers were started by torchrun, srun or mpirun; give the number there"
                )
            os.environ.update(joined)
            return Launch(int(joined["WORLD_SIZE"]), False, True, joined["RANK"] == "0")
        size = nproc_per_node or _visible_devices(device)
        if size < 1:
            raise ConfigError(f"--nproc-per-node: at least 1 is needed, got {size}")
        return Launch(size, size > 1, False, True)


def restarted() -> bool:
    """Whether a launcher started this process again after a failure, so that it should go on and not begin."""
    return any(int(os.environ.get(name) or 0) > 0 for name in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"))


def _visible_devices(device: str) -> int:
    if device == "cpu":
        return 1
    import torch

    return max(1, torch.cuda.device_count())


def _joined_environment(env: Mapping[str, str]) -> dict[str, str] | None:
    """torch's variables (RANK, ...) for a process that something else launched, or None."""
    if "RANK" in env and "WORLD_SIZE" in env:  # torchrun
        return {key: env[key] for key in ("RANK", "WORLD_SIZE")} | {"LOCAL_RANK": env.get("LOCAL_RANK", "0")}
    if "SLURM_STEP_ID" in env and int(env.get("SLURM_STEP_NUM_TASKS", "1")) > 1:  # srun, not the batch script itself
        rank, size, local = env["SLURM_PROCID"], env["SLURM_STEP_NUM_TASKS"], env["SLURM_LOCALID"]
        # The launch node's address would be the machine where srun was typed; rank 0 is on the first of the list.
        nodes = re.match(r"([^\[,]+)(?:\[(\d+))?", env.get("SLURM_STEP_NODELIST", ""))
        address = nodes[1] + (nodes[2] or "") if nodes else env.get("SLURM_LAUNCH_NODE_IPADDR")
        port = 20000 + int(env.get("SLURM_JOB_ID", "0")) % 10000
    elif "OMPI_COMM_WORLD_RANK" in env:
        rank, size, local = env["OMPI_COMM_WORLD_RANK"], env["OMPI_COMM_WORLD_SIZE"], env["OMPI_COMM_WORLD_LOCAL_RANK"]
        address = "127.0.0.1" if env.get("OMPI_COMM_WORLD_LOCAL_SIZE") == size else None
        port = 29500
    elif "PMI_RANK" in env:
        rank, size, local = env["PMI_RANK"], env["PMI_SIZE"], env.get("MPI_LOCALRANKID", "0")
        address = "127.0.0.1" if env.get("MPI_LOCALNRANKS") == size else None
        port = 29500
    else:
        return None
    address = env.get("MASTER_ADDR", address)
    if address is None:
        raise ConfigError("MASTER_ADDR: set it to the address of rank 0's machine, which mpirun does not tell")
    return {
        "RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": local,
        "MASTER_ADDR": address, "MASTER_PORT": env.get("MASTER_PORT", str(port)),
    }  # fmt: skip


def launch(worker: Callable[..., int], args: tuple[Any, ...], how: Launch) -> int:
    """Run `worker(*args)` on every rank; returns the exit code. `worker` returns the signal that stopped it, or 0.

    A worker that fails ends the others within seconds, and its error is the one that is raised or shown.
    """
    if not how.starts_workers:
        stopped = worker(*args)
        # Under another launcher a clean stop is success; on its own the shell should see that the run did not finish.
        return 128 + stopped if stopped and not how.joined else 0

    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    for noise in ("torch.distributed.elastic", "torch.multiprocessing"):
        logging.getLogger(noise).setLevel(logging.CRITICAL)  # errors are shown once, below
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=how.world_size, run_id=f"crosstrain-{os.getpid()}",
        rdzv_backend="c10d", rdzv_endpoint="localhost:0",
        local_addr="127.0.0.1", start_method="spawn", max_restarts=0, monitor_interval=0.1,
        signals_to_handle="SIGHUP",  # its other handlers would end the workers; those below let them save first
        shutdown_timeout=5,  # for ranks that wait for a dead one and cannot hear
    )  # fmt: skip
    stop: list[int] = []

    def pass_on(number: int, _frame: Any) -> None:
        stop.append(number)
        for child in multiprocessing.active_children():
            if child.pid is not None:
                os.kill(child.pid, signal.SIGUSR1)

    handlers = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
    environment = _worker_environment(how.world_size)
    try:
        os.environ.update(environment)
        elastic_launch(config, _run_worker)(worker, args)
    except ChildFailedError as error:
        if stop and all(f.exitcode == -signal.SIGUSR1 for f in error.failures.values()):
            return 128 + stop[0]  # stopped before the workers could listen; there was nothing to save
        _raise_first(error)
    finally:
        for name in environment:
            del os.environ[name]  # the next workers may be more
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return 128 + stop[0] if stop else 0


def _worker_environment(workers: int) -> dict[str, str]:
    """What the environment lacks for so many workers."""
    wanted = {
        "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // workers)),
        # Killed workers cannot return their semaphores; that is not news beside the error that killed them.
        "PYTHONWARNINGS": "ignore::UserWarning:multiprocessing.resource_tracker",
    }
    if sys.platform == "linux":  # all workers are here; gloo need not ask a resolver which interface leads to itself
        wanted["GLOO_SOCKET_IFNAME"] = "lo"
    return {name: value for name, value in wanted.items() if name not in os.environ}


def _run_worker(worker: Callable[..., int], args: tuple[Any, ...]) -> int:
    global _launcher_shows_errors
    _launcher_shows_errors = True
    try:
        return worker(*args)
    except Exception as error:
        if _is_lost_peer(error):
            time.sleep(5)  # the rank that went away has the real error; the launcher ends this one meanwhile
        fail(error)


def fail(error: Exception) -> NoReturn:
    """End this process with `error`, shown once by the launcher or else here, whatever its threads wait for."""
    tell(error)
    os._exit(1)


def tell(error: Exception) -> None:
    """Hand `error` to the launcher, which shows it when this process ends, or show it if another program launched."""
    if not _launcher_shows_errors:
        print(f"error: {sentence(error)}", file=sys.stderr, flush=True)
        return
    details = {
        "message": str(error) or type(error).__name__,
        "extraInfo": {
            "user_error": isinstance(error, UserError),
            "py_callstack": "".join(traceback.format_exception(error)),
            "timestamp": str(int(time.time())),
        },
    }
    with open(os.environ["TORCHELASTIC_ERROR_FILE"], "w", encoding="utf-8") as file:
        json.dump({"message": details}, file)


def leave(seconds: float) -> NoReturn:
    """End this process as failed, silent from now on and `seconds` later, because what is wrong has been told."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    time.sleep(seconds)
    os._exit(1)


def _is_lost_peer(error: Exception) -> bool:
    text = str(error)
    return any(
        sign in text for sign in ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "NCCL")
    )


def _raise_first(error: Any) -> None:
    """Raise the failure that came first as one error: a UserError's sentence, or the worker's traceback."""
    failures = sorted(error.failures.items(), key=lambda item: item[1].timestamp)
    killed = [(rank, f) for rank, f in failures if f.exitcode < 0 and f.exitcode != -signal.SIGTERM]
    rank, failure = (killed or failures)[0]
    if killed:
        name = signal.Signals(-failure.exitcode).name
        hint = " (the kernel does this when memory runs out)" if name == "SIGKILL" else ""
        raise UserError(f"rank {rank} was killed by {name}{hint}; the same command resumes from the last checkpoint")
    data = failure.error_file_data if isinstance(failure.error_file_data, dict) else {}
    message = data.get("message", {})
    extra = message.get("extraInfo", {}) if isinstance(message, dict) else {}
    if extra.get("user_error"):
        raise UserError(message["message"])
    raise WorkerFailure(rank, extra.get("py_callstack") or failure.message)


class WorkerFailure(Exception):
    """A worker failed with something that is not the user's mistake; carries its traceback."""

    def __init__(self, rank: int, trace: str) -> None:
        super().__init__(f"rank {rank} failed:\n{trace}")
