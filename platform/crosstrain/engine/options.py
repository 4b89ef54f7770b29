"""Options shared by several runners, as base classes of their `Options` dataclasses."""

from dataclasses import dataclass
from typing import Any

from crosstrain.config.bounds import PositiveInt


@dataclass
class ContextOptions:
    """Options of runners with context parallelism."""

    context_parallel: PositiveInt = 1  # ranks that share each sequence; each computes a part of its tokens

    def replicas(self, world_size: int) -> list[list[int]]:
        """Groups of ranks that copy or shard the same parameters and sum their gradients; default: all ranks."""
        return [[*range(world_size)]]


def context_size(options: Any) -> int:
    """Number of ranks that share each sequence under a runner's options."""
    return options.context_parallel if isinstance(options, ContextOptions) else 1
