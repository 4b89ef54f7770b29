"""Rendezvous of all ranks at a TCP store, before process groups exist."""

import os
import socket
import sys
import time
from datetime import timedelta
from threading import Thread
from typing import Any

import torch.distributed as dist

from crosstrain.utils.errors import ConfigError, RankLost, first_line

_QUIET = 5.0  # seconds until a waiting rank prints a note; afterwards it prints one every minute
_STRANGE = 20.0  # seconds until an error is raised because the program at the port is not this run's rank 0
_SHOWN = 64  # number of ranks, counted from rank 0, that a note checks and lists
# Environment variables that identify a cluster job; each launcher sets some of them.
_JOB = ("SLURM_JOB_ID", "SLURM_STEP_ID", "PMIX_NAMESPACE", "PBS_JOBID", "LSB_JOBID", "TORCHELASTIC_RUN_ID")


def wait_for_ranks(rank: int, size: int, timeout: float) -> dist.Store:
    """Wait at most `timeout` seconds until all ranks have joined the store, and return the store.

    Raises RankLost if a rank does not join. If another program uses the port, raises ConfigError, or RankLost if the
    launcher chose the port, because a restart can then help.
    """
    host, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    if not host or not port.isdecimal():
        raise ConfigError("MASTER_ADDR, MASTER_PORT: set them to rank 0's machine and a free port there")
    here, free = socket.gethostname(), "set MASTER_PORT to a free one, the same for every rank"
    at = f"rank {rank} of {size} on {here}"
    # Our launcher and torchrun choose a new port for each restart.
    in_use = RankLost if "TORCHELASTIC_RUN_ID" in os.environ else ConfigError
    found, began, due, error = dict[str, Any](), time.monotonic(), _QUIET, None
    # This runs in a thread, because the call into torch may never return, and blocks Python's signal handlers.
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
    """Connect this rank to the store and count it.

    Sets `found["answered"]`, the time of the first answer, and then either `found["store"]` or `found["error"]`.
    """
    by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # torchrun hosts the store
    is_host = rank == 0 and not by_agent
    while not is_host and "answered" not in found:
        try:
            socket.create_connection(address, timeout=5).close()
            found["answered"] = time.monotonic()
        except OSError:  # rank 0 has not started yet
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
