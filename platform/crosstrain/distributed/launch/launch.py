"""The number of workers of a run, and the way they are started: by torchrun, srun or mpirun, or by this program.

This program starts one worker per visible GPU, or one worker if there is no GPU. For a run on several machines, the
user starts the program with --nnodes on each machine. A single worker runs in this process, unless restarts are
allowed.
"""

import os
from dataclasses import dataclass

from crosstrain.distributed.launch.cluster_env import worker_environment
from crosstrain.distributed.launch.rendezvous import Nodes
from crosstrain.utils.errors import ConfigError


@dataclass(frozen=True)
class Launch:
    """The number of workers of a run, and the way they are started."""

    world_size: int  # number of workers; the maximum if the number of nodes may vary
    starts_workers: bool  # this process starts the workers
    joined: bool  # torchrun, srun or mpirun started this process as one of the workers
    is_first: bool  # this process is the launcher on node 0, the only worker, or rank 0
    nodes: Nodes | None = None  # None: only this machine
    max_restarts: int = 0
    start_method: str = "spawn"  # multiprocessing start method

    @staticmethod
    def detect(nproc_per_node: int | None, device: str, nodes: Nodes | None = None, max_restarts: int = 0) -> "Launch":
        """Detect from the environment whether torchrun, srun or mpirun started this process as a worker.

        If not, compute the number of workers from flags, GPUs and nodes.
        """
        # With --nnodes, this process starts this machine's workers itself, even under srun or Kubeflow. Kubeflow sets
        # RANK to the machine's index and does not set LOCAL_RANK.
        joined = worker_environment(os.environ) if nodes is None or "LOCAL_RANK" in os.environ else None
        if joined is not None:
            if flag := "--nnodes" if nodes else "--nproc-per-node" if nproc_per_node is not None else None:
                raise ConfigError(
                    f"{flag}: torchrun, srun or mpirun started the workers; give the number to that launcher instead"
                )
            os.environ.update(joined)
            return Launch(int(joined["WORLD_SIZE"]), False, True, joined["RANK"] == "0")
        size = nproc_per_node or _visible_devices(device)
        if size < 1:
            raise ConfigError(f"--nproc-per-node: expected at least 1, got {size}")
        if nodes is not None:
            return Launch(size * nodes.max_nodes, True, False, nodes.is_host, nodes, max_restarts)
        return Launch(size, size > 1 or max_restarts > 0, False, True, None, max_restarts)

    @property
    def nproc_per_node(self) -> int:
        return self.world_size // (self.nodes.max_nodes if self.nodes else 1)

    @property
    def world_sizes(self) -> list[int]:
        """All possible numbers of workers, in ascending order."""
        least, most = (self.nodes.min_nodes, self.nodes.max_nodes) if self.nodes else (1, 1)
        return [self.nproc_per_node * nodes for nodes in range(least, most + 1)]


def _visible_devices(device: str) -> int:
    if device == "cpu":
        return 1
    import torch

    return max(1, torch.cuda.device_count())
