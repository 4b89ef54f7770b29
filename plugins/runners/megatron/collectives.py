"""Collectives of tensor-parallel ranks in the forward, each with its transpose in the backward.

The pairs are Megatron-LM's (Shoeybi et al., 2019; Korthikanti et al., 2022). Activations are [batch, length, width].
The collectives are those of torch.distributed, so that the watchdog can monitor them.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def _same(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    return x.view_as(x)


def _sum(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sum over the ranks in new memory, because gradient checkpointing may keep `x`."""
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def _part(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[batch, length, width] -> this rank's [batch, part, width]."""
    part = x.shape[1] // dist.get_world_size(group)
    return x.narrow(1, dist.get_rank(group) * part, part).contiguous()


def _gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[batch, part, width] of each rank -> [batch, length, width]."""
    parts = x.new_empty(dist.get_world_size(group), *x.shape)
    dist.all_gather_single(parts.flatten(0, 1), x.contiguous(), group=group)
    return parts.transpose(0, 1).reshape(x.shape[0], -1, x.shape[2])


def _scatter_sum(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[batch, length, width] -> this rank's [batch, part, width] of the sum."""
    size = dist.get_world_size(group)
    parts = x.reshape(x.shape[0], size, -1, x.shape[2]).transpose(0, 1).contiguous()
    out = torch.empty_like(parts[0])
    dist.reduce_scatter_single(out, parts.flatten(0, 1), group=group)
    return out


def _exchange(
    exchange: Callable[[Tensor, dist.ProcessGroup], Tensor], transpose: Callable[[Tensor, dist.ProcessGroup], Tensor]
) -> type[torch.autograd.Function]:
    """Make an autograd function from a collective on activations and its transpose on gradients."""

    class Exchange(torch.autograd.Function):  # torch.compile can trace static methods with closures
        @staticmethod
        def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:  # type: ignore[override]
            ctx.group = group
            return exchange(x, group)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
            return transpose(grad, ctx.group), None

    return Exchange


# Forward: identity. Backward: sum over the ranks, because each rank used its copy differently.
Copy = _exchange(_same, _sum)
# Forward: sum over the ranks. Backward: identity, because gradients are already equal on all ranks.
Reduce = _exchange(_sum, _same)
# Forward: gather the parts of a sequence. Backward: sum over the ranks, and each rank keeps its part.
Gather = _exchange(_gather, _scatter_sum)
# Forward: sum over the ranks, and each rank keeps its part of the sequence. Backward: gather.
ReduceScatter = _exchange(_scatter_sum, _gather)
# Forward: this rank's part of a sequence that all ranks hold. Backward: gather.
Split = _exchange(_part, _gather)
# Forward: gather the parts of a sequence. Backward: this rank's part, because gradients are equal on all ranks.
Unsplit = _exchange(_gather, _part)
