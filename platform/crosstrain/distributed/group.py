"""Groups of ranks: how all of them meet, and collectives on Python values, with one process each the identity."""

import os
import socket
import sys
import time
import zlib
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from threading import Thread
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from crosstrain.utils import paths
from crosstrain.utils.errors import CheckpointError, ConfigError, RankLost, TrainingError, UserError, first_line

T = TypeVar("T")

_QUIET = 5.0  # seconds that a rank waits for the others before it says so; then it does every minute
_STRANGE = 20.0  # seconds after which a program that answers at the port, but is not this run's rank 0, is named
_SHOWN = 64  # ranks that are looked for by number
# Variables that tell the jobs of a cluster apart, as far as their launchers set them.
_JOB = ("SLURM_JOB_ID", "SLURM_STEP_ID", "PMIX_NAMESPACE", "PBS_JOBID", "LSB_JOBID", "TORCHELASTIC_RUN_ID")

# Called with a group whose ranks met in different collectives, before the error is raised. The watchdog sets it.
desync_handler: Callable[[dist.ProcessGroup], None] | None = None


class Group:
    """Ranks that work together. One process needs no process group and gets none."""

    def __init__(self, process_group: dist.ProcessGroup | None = None) -> None:
        self.rank = dist.get_rank(process_group) if process_group else 0
        self.size = dist.get_world_size(process_group) if process_group else 1
        self.process_group = process_group if self.size > 1 else None

    def twin(self) -> "Group":
        """A group of the same ranks, which are all, for small messages on the host. Collective."""
        if self.process_group is None:
            return Group()
        return Group(cast(dist.ProcessGroup, dist.new_group(backend="gloo")))

    def all_gather(self, value: T) -> list[T]:
        """Return every rank's value, in rank order. For small Python objects, not for tensors."""
        if self.process_group is None:
            return [value]
        out: list[Any] = [None] * self.size
        dist.all_gather_object(out, value, group=self.process_group)
        return out

    def broadcast(self, value: T) -> T:
        """Return the first rank's value. For small Python objects, not for tensors."""
        if self.process_group is None:
            return value
        out: list[Any] = [value]
        dist.broadcast_object_list(out, group=self.process_group, group_src=0)
        return out[0]

    def all_reduce_sum(self, *values: float) -> list[float]:
        """Return the sums over the ranks, in double precision.

        Raises TrainingError, instead of wrong sums, when ranks meet here from different parts of the platform.
        """
        if self.process_group is None:
            return list(values)
        caller = sys._getframe(1)
        code, module = caller.f_code, caller.f_globals.get("__name__", "")
        # A number for the function that calls; plugins, which may branch on the rank around a call, have none.
        tag = zlib.crc32(f"{module}.{code.co_qualname}".encode()) if module.startswith("crosstrain.") else 0
        tensor = torch.tensor([*values, tag], dtype=torch.float64)  # on the CPU: no wait for the GPU
        dist.all_reduce(tensor, group=self.process_group)
        *sums, tags = tensor.tolist()
        if tags != tag * self.size:
            if desync_handler is not None:
                desync_handler(self.process_group)
            raise TrainingError(
                f"the ranks met in different collectives, one of them at {paths.show(Path(code.co_filename))}:"
                f"{caller.f_lineno} in {code.co_name}; each must be called by every rank"
            )
        return sums

    def together(self, action: Callable[[], T]) -> list[T]:
        """Run `action` on every rank; returns the ranks' results. Collective.

        If some fail with a UserError or an OSError, the error of one is raised on every rank, damage last: a bucket
        that cannot be read, or a full disk, is none.
        """
        result = problem = None
        try:
            result = action()
        except (UserError, OSError) as error:
            problem = error
        results, problems = zip(*self.all_gather((result, problem)), strict=True)
        if found := [error for error in problems if error is not None]:
            raise min(found, key=lambda error: isinstance(error, CheckpointError))
        return list(results)

    def barrier(self) -> None:
        if self.process_group is not None:
            self.all_gather(None)


def world() -> tuple[int, int]:
    """Return (local rank, world size) from the launcher's environment variables."""
    return int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def choose_device(choice: str, local_rank: int) -> torch.device:
    """Return this rank's device for `run.device`. Raises ConfigError for cuda without a GPU."""
    if choice == "cuda" and not torch.cuda.is_available():
        raise ConfigError("run.device: cuda needs a GPU, and torch sees none; use auto or cpu")
    if choice == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", local_rank % torch.cuda.device_count())  # srun may show each task its own GPU alone
    torch.cuda.set_device(device)
    return device


def meet(rank: int, size: int, timeout: float) -> dist.Store:
    """Return the store of all ranks when each of them has come to it, in `timeout` seconds.

    Raises ConfigError where a different program has the port, and RankLost where a rank does not come.
    """
    host, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    if not host or not port.isdecimal():
        raise ConfigError("MASTER_ADDR, MASTER_PORT: set them to rank 0's machine and a free port there")
    here, free = socket.gethostname(), "set MASTER_PORT to a free one, the same for every rank"
    at = f"rank {rank} of {size} on {here}"
    # Our launcher and torchrun choose the port, and choose anew when they start workers again.
    in_use = RankLost if "TORCHELASTIC_RUN_ID" in os.environ else ConfigError
    found, began, due, error = dict[str, Any](), time.monotonic(), _QUIET, None
    # In a thread, as the library's call may never return, and holds signals off.
    Thread(target=_arrive, args=(found, (host, int(port)), rank, size, timeout), daemon=True).start()
    while error is None and (waited := time.monotonic() - began) < timeout:
        store, error = found.get("store"), found.get("error")
        if store is not None and store.add("ranks", 0) >= size:
            return store
        if store is None and time.monotonic() > found.get("answered", began + timeout) + _STRANGE:
            raise in_use(f"MASTER_PORT: what answers at {host}:{port} is not rank 0 of this run; {free}")
        if waited > due:
            due = waited + 60
            absent = [n for n in range(min(size, _SHOWN)) if not (store.check([f"rank {n}"]) if store else n)]
            print(f"{at} waits for {absent} at {host}:{port}, for at most {timeout:.0f} s", file=sys.stderr, flush=True)
        time.sleep(max(0.1, size / 10_000))
    if "EADDRINUSE" in str(error):
        raise in_use(f"MASTER_PORT: {port} is in use on {here}; {free}")
    why = f" ({first_line(error)})" if error else ": one is stopped or stuck, or its machine is lost"
    raise RankLost(
        f"the ranks did not all start within {timeout:.0f} s (run.collective_timeout and a minute); {at} waited at "
        f"{host}:{port}{why}"
    )


def _arrive(found: dict[str, Any], address: tuple[str, int], rank: int, size: int, timeout: float) -> None:
    """Connect a rank and count it. `found` gets the time of the first answer, and the store or an error."""
    by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # torchrun keeps the store, at its own port
    is_host = rank == 0 and not by_agent
    while not is_host and "answered" not in found:
        try:
            socket.create_connection(address, timeout=5).close()
            found["answered"] = time.monotonic()
        except OSError:  # rank 0 is not there yet
            time.sleep(0.2)
    try:
        store = dist.TCPStore(
            *address, size, is_host, timedelta(seconds=timeout), wait_for_workers=False, multi_tenant=True
        )
        job = " ".join(["job", *(os.environ.get(name, "") for name in _JOB)])
        if is_host:
            store.set(job, "")
        elif not by_agent:
            store.wait([job])
        store.set(f"rank {rank}", "")
        store.add("ranks", 1)
        found["store"] = store
    except Exception as error:
        found["error"] = error
