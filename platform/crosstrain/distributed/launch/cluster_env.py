"""Processes that torchrun, srun or mpirun started: what their environments say, in torch's words."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from crosstrain.utils.errors import ConfigError


def restarted() -> bool:
    """Whether a launcher started this process again after a failure, so that it should go on and not begin."""
    return any(int(os.environ.get(name) or 0) > 0 for name in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"))


def joined_environment(env: Mapping[str, str]) -> dict[str, str] | None:
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
