"""Machines, workers and devices of one launch."""

from __future__ import annotations

import os
from dataclasses import dataclass

from crosstrain.distributed.launch.cluster_env import joined_environment
from crosstrain.distributed.launch.rendezvous import Nodes
from crosstrain.utils.errors import ConfigError


@dataclass(frozen=True)
class Launch:
    """How this process becomes workers."""

    world_size: int  # at most, where the number of nodes may vary
    starts_workers: bool  # this process starts them with torch's elastic agent
    joined: bool  # torchrun, srun or mpirun started it, among others
    is_first: bool  # this process is the launcher, on node 0, or the only worker, or rank 0
    nodes: Nodes | None = None  # None: this machine alone
    max_restarts: int = 0  # how often workers that failed are started again

    @staticmethod
    def detect(
        nproc_per_node: int | None, device: str, nodes: Nodes | None = None, max_restarts: int = 0
    ) -> Launch:  # fmt: skip
        """From the environment, or else from `nproc_per_node`, the GPUs that are visible, and the nodes."""
        # A process per machine, with the flags of its node, starts workers itself, whoever started it: srun, or
        # Kubeflow, which calls the machine's number RANK and knows no LOCAL_RANK.
        joined = joined_environment(os.environ) if nodes is None or "LOCAL_RANK" in os.environ else None
        if joined is not None:
            flag = "--nnodes" if nodes else "--nproc-per-node" if nproc_per_node is not None else None
            if flag:
                raise ConfigError(
                    f"{flag}: the workers were started by torchrun, srun or mpirun; give the number there"
                )
            os.environ.update(joined)
            return Launch(int(joined["WORLD_SIZE"]), False, True, joined["RANK"] == "0")
        size = nproc_per_node or _visible_devices(device)
        if size < 1:
            raise ConfigError(f"--nproc-per-node: at least 1 is needed, got {size}")
        if nodes is not None:
            return Launch(size * nodes.most, True, False, nodes.hosts, nodes, max_restarts)
        return Launch(size, size > 1 or max_restarts > 0, False, True, None, max_restarts)

    @property
    def nproc_per_node(self) -> int:
        return self.world_size // (self.nodes.most if self.nodes else 1)

    @property
    def world_sizes(self) -> list[int]:
        """Numbers of workers that training may have, the smallest first."""
        if self.nodes is None:
            return [self.world_size]
        return [self.nproc_per_node * nodes for nodes in range(self.nodes.least, self.nodes.most + 1)]


def _visible_devices(device: str) -> int:
    if device == "cpu":
        return 1
    import torch

    return max(1, torch.cuda.device_count())
