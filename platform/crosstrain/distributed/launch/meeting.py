"""The meeting of the ranks, before there is a process group: ranks that wait say so, and a port in use is named."""

import os
import socket
import sys
import time
from datetime import timedelta
from threading import Thread
from typing import Any

import torch.distributed as dist

from crosstrain.utils.errors import ConfigError, RankLost, first_line

_QUIET = 5.0  # seconds that a rank waits for the others before it says so; then it does every minute
_STRANGE = 20.0  # seconds after which a program that answers at the port, but is not this run's rank 0, is named
_SHOWN = 64  # ranks that are looked for by number
# Variables that tell the jobs of a cluster apart, as far as launchers set them.
_JOB = ("SLURM_JOB_ID", "SLURM_STEP_ID", "PMIX_NAMESPACE", "PBS_JOBID", "LSB_JOBID", "TORCHELASTIC_RUN_ID")
_FREE = "set MASTER_PORT to a free one, the same for every rank"


def meet(rank: int, size: int, timeout: float) -> dist.Store:
    """Return the store of all ranks when each of them has come to it, in `timeout` seconds.

    Raises ConfigError where a different program has the port, and RankLost where a rank does not come.
    """
    host, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    if not host or not port.isdecimal():
        raise ConfigError("MASTER_ADDR, MASTER_PORT: set them to rank 0's machine and a free port there")
    here, found = socket.gethostname(), dict[str, Any]()
    # In a thread, as the library's call may never return, and holds signals off.
    Thread(target=_arrive, args=(found, (host, int(port)), rank, size, timeout), daemon=True).start()
    began, due, missing = time.monotonic(), _QUIET, ""
    while (waited := time.monotonic() - began) < timeout and "error" not in found:
        store = found.get("store")
        if store is not None and store.add("ranks", 0) >= size:
            return store
        if store is None and time.monotonic() > found.get("answered", began + timeout) + _STRANGE:
            raise ConfigError(f"MASTER_PORT: what answers at {host}:{port} is not rank 0 of this run; {_FREE}")
        if waited > due:
            missing, due = _missing(store, size), waited + 60
            said = f"rank {rank} of {size} on {here} waits for {missing} to come to {host}:{port}"
            print(f"{said} (MASTER_ADDR, MASTER_PORT), for at most {timeout:.0f} s", file=sys.stderr, flush=True)
        time.sleep(0.1)
    if "EADDRINUSE" in str(error := found.get("error", "")):
        raise ConfigError(f"MASTER_PORT: {port} is in use on {here}; {_FREE}")
    raise RankLost(
        f"the ranks did not all start within {timeout:.0f} s (run.collective_timeout and a minute): rank {rank} on "
        f"{here} waited for {missing} at {host}:{port}{error and f' ({first_line(error)})'}"
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
        limit = timedelta(seconds=timeout)
        store = dist.TCPStore(*address, size, is_host, limit, wait_for_workers=False, multi_tenant=True)
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


def _missing(store: dist.Store | None, size: int) -> str:
    """Return the ranks that have not come."""
    if store is None:
        return "rank 0"
    absent = [str(rank) for rank in range(min(size, _SHOWN)) if not store.check([f"rank {rank}"])]
    return f"{size - store.add('ranks', 0)} ranks ({', '.join(absent)})"
