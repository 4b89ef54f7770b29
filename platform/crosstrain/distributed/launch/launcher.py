"""One command, N workers.

Run plainly, the program starts one worker per visible GPU (one on a CPU) through torch's elastic agent, on one machine
or, together with the same command on others, on several; a single worker without restarts runs in this very process.
Run by torchrun, srun or mpirun, it is a worker already and joins the others.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from crosstrain.distributed.launch.cluster_env import worker_environment
from crosstrain.distributed.launch.rendezvous import Nodes
from crosstrain.distributed.launch.signals import sigint_kills
from crosstrain.utils.errors import ConfigError


@dataclass(frozen=True)
class Launch:
    """The workers of a run and how they are started."""

    world_size: int  # at most, where the number of nodes may vary
    starts_workers: bool  # this process starts them with torch's elastic agent
    joined: bool  # torchrun, srun or mpirun started this process, among others
    is_first: bool  # this process is the launcher on node 0, the only worker, or rank 0
    nodes: Nodes | None = None  # None: this machine alone
    max_restarts: int = 0
    start_method: str = "spawn"  # of multiprocessing

    @staticmethod
    def detect(nproc_per_node: int | None, device: str, nodes: Nodes | None = None, max_restarts: int = 0) -> Launch:
        """Read the environment, or else count `nproc_per_node`, the visible GPUs and the nodes."""
        # A process per machine, with the flags of its node, starts workers itself, whoever started it: srun, or
        # Kubeflow, which calls the machine's number RANK and sets no LOCAL_RANK.
        joined = worker_environment(os.environ) if nodes is None or "LOCAL_RANK" in os.environ else None
        if joined is not None:
            if flag := "--nnodes" if nodes else "--nproc-per-node" if nproc_per_node is not None else None:
                raise ConfigError(f"{flag}: torchrun, srun or mpirun started the workers; give it the number instead")
            os.environ.update(joined)
            return Launch(int(joined["WORLD_SIZE"]), False, True, joined["RANK"] == "0")
        size = nproc_per_node or _visible_devices(device)
        if size < 1:
            raise ConfigError(f"--nproc-per-node: at least 1 is needed, got {size}")
        if nodes is not None:
            return Launch(size * nodes.max_nodes, True, False, nodes.is_host, nodes, max_restarts)
        return Launch(size, size > 1 or max_restarts > 0, False, True, None, max_restarts)

    @property
    def nproc_per_node(self) -> int:
        return self.world_size // (self.nodes.max_nodes if self.nodes else 1)

    @property
    def world_sizes(self) -> list[int]:
        """Numbers of workers that training may have, the smallest first."""
        if self.nodes is None:
            return [self.world_size]
        return [self.nproc_per_node * nodes for nodes in range(self.nodes.min_nodes, self.nodes.max_nodes + 1)]


def launch(worker: Callable[..., int], args: tuple[Any, ...], how: Launch) -> int:
    """Run `worker(*args)` on every rank; returns the exit code. `worker` returns the signal that stopped it, or 0.

    A worker that fails ends the others within seconds. All start again, up to `how.max_restarts` times, unless the
    error is one that the user has to mend; the last error is raised, or shown.
    """
    if not how.starts_workers:
        stopped = worker(*args)
        # Under another launcher a clean stop is success; on its own the shell should see that the run did not finish.
        return 128 + stopped if stopped and not how.joined else 0

    with sigint_kills():
        from crosstrain.distributed.launch.elastic_agent import run_agent

    return run_agent(worker, args, how)


def _visible_devices(device: str) -> int:
    if device == "cpu":
        return 1
    import torch

    return max(1, torch.cuda.device_count())
