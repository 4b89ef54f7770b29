"""Environment variables that launchers (torchrun, srun, mpirun and our own) set for workers."""

import os
import re
from collections.abc import Mapping

from crosstrain.utils.errors import ConfigError

# Variables of Open MPI and MPICH: rank, number of ranks, local rank, number of ranks on this machine.
_MPI = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)


def was_restarted() -> bool:
    """Return True if a launcher restarted this process after a failure, so that the run should resume."""
    return any(int(os.environ.get(name) or 0) > 0 for name in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"))


def worker_environment(env: Mapping[str, str]) -> dict[str, str] | None:
    """Translate the environment of torchrun, srun or mpirun into RANK, WORLD_SIZE, LOCAL_RANK and MASTER_ADDR.

    Returns None if this process is not a worker of one of these launchers.
    """
    if "RANK" in env and "WORLD_SIZE" in env:  # torchrun has set them
        return {key: env[key] for key in ("RANK", "WORLD_SIZE")} | {"LOCAL_RANK": env.get("LOCAL_RANK", "0")}
    port = 29500
    if "SLURM_STEP_ID" in env and int(env.get("SLURM_STEP_NUM_TASKS", "1")) > 1:  # a task of srun, not the batch script
        rank, size, local = env["SLURM_PROCID"], env["SLURM_STEP_NUM_TASKS"], env["SLURM_LOCALID"]
        # Rank 0 is on the first node of the list, not on the launch node, which is the machine that ran srun.
        nodes = re.match(r"([^\[,]+)(?:\[(\d+))?", env.get("SLURM_STEP_NODELIST", ""))
        address = nodes[1] + (nodes[2] or "") if nodes else env.get("SLURM_LAUNCH_NODE_IPADDR")
        port = 20000 + int(env.get("SLURM_JOB_ID", "0")) % 10000
    elif names := next((names for names in _MPI if names[0] in env), None):
        rank, size, local = env[names[0]], env[names[1]], env.get(names[2], "0")
        address = "127.0.0.1" if env.get(names[3]) == size else None
    else:
        return None
    address = env.get("MASTER_ADDR", address)
    if address is None:
        raise ConfigError("MASTER_ADDR: mpirun does not set it; set it to the address of rank 0's machine")
    return {
        "RANK": rank,
        "WORLD_SIZE": size,
        "LOCAL_RANK": local,
        "MASTER_ADDR": address,
        "MASTER_PORT": env.get("MASTER_PORT", str(port)),
    }
