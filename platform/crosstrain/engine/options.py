"""Options that runners share, as bases of their dataclasses `Options`."""

from dataclasses import dataclass
from typing import Any

from crosstrain.config.bounds import PositiveInt


@dataclass
class ContextOptions:
    """Options of runners whose ranks can share sequences."""

    context_parallel: PositiveInt = 1  # ranks that share each sequence: every one computes a part of its tokens

    def replicas(self, world_size: int) -> list[list[int]]:
        """Ranks that have, or share, one copy of the same parameters, and whose gradients are summed; all of them."""
        return [[*range(world_size)]]


@dataclass
class ExpertOptions(ContextOptions):
    """Options of runners whose ranks can also share experts."""

    expert_parallel: PositiveInt = 1  # ranks that share the experts: each holds some of them, sharded over the rest


def context_size(options: Any) -> int:
    """Ranks that share each sequence under a runner's options."""
    return options.context_parallel if isinstance(options, ContextOptions) else 1


def expert_size(options: Any) -> int:
    """Ranks that share the experts under a runner's options."""
    return options.expert_parallel if isinstance(options, ExpertOptions) else 1
