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

_QUIET = 5.0  # seconds until a waiting rank prints its first note; further notes follow every minute
_STRANGE = 20.0  # seconds until a program that answers at the port is considered not to be rank 0 of this run
_SHOWN = 64  # a note lists only missing ranks below this number
# Environment variables that identify a cluster job; each launcher sets some of them.
_JOB = ("SLURM_JOB_ID", "SLURM_STEP_ID", "PMIX_NAMESPACE", "PBS_JOBID", "LSB_JOBID", "TORCHELASTIC_RUN_ID")


def wait_for_ranks(rank: int, size: int, timeout: float) -> dist.Store:
    """Wait at most `timeout` seconds until all ranks have joined the store, and return the store.

    Raises RankLost if a rank does not join. If a different program uses the port, raises ConfigError. If the launcher
    chose that port, raises RankLost instead, because a restart can help.
    """
    host, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    if not host or not port.isdecimal():
        raise ConfigError("MASTER_ADDR, MASTER_PORT: set them to the address of rank 0's machine and a free port there")
    here, free = socket.gethostname(), "set MASTER_PORT to a free port, the same for every rank"
    at = f"rank {rank} of {size} on {here}"
    # Our launcher and torchrun choose a new port for each restart.
    in_use = RankLost if "TORCHELASTIC_RUN_ID" in os.environ else ConfigError
    found, began, due, error = dict[str, Any](), time.monotonic(), _QUIET, None
    # `_arrive` runs in a thread, because its call into torch blocks Python's signal handlers and may never return.
    Thread(target=_arrive, args=(found, (host, int(port)), rank, size, timeout), daemon=True).start()
    while error is None and (waited := time.monotonic() - began) < timeout:
        store, error = found.get("store"), found.get("error")
        if store is not None and store.add("ranks", 0) >= size:
            return store
        if store is None and time.monotonic() > found.get("answered", began + timeout) + _STRANGE:
            raise in_use(f"MASTER_PORT: the program that answers at {host}:{port} is not rank 0 of this run; {free}")
        if waited > due:
            due = waited + 60
            absent = [n for n in range(min(size, _SHOWN)) if not (store.check([f"rank {n}"]) if store else n)]
            print(
                f"{at} is waiting for ranks {absent} at {host}:{port}, for at most {timeout:.0f} s",
                file=sys.stderr,
                flush=True,
            )
        time.sleep(max(0.1, size / 10_000))
    if "EADDRINUSE" in str(error):
        raise in_use(f"MASTER_PORT: {port} is in use on {here}; {free}")
    why = f" ({first_line(error)})" if error else "; a rank is stopped or stuck, or its machine is lost"
    raise RankLost(
        f"the ranks did not all start within {timeout:.0f} s (run.collective_timeout plus one minute); {at} waited at "
        f"{host}:{port}{why}"
    )


def _arrive(found: dict[str, Any], address: tuple[str, int], rank: int, size: int, timeout: float) -> None:
    """Connect this rank to the store, and increase the store's count of ranks.

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
