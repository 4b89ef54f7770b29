"""Context parallelism: ranks share sequences, and each rank computes a part of every row.

In a block, only attention mixes tokens. Before attention, each rank has a part of every row in all heads.

If the number of ranks divides the number of heads, an all-to-all exchanges these parts for whole rows in some heads;
after attention, an all-to-all does the reverse (DeepSpeed-Ulysses, Jacobs et al., 2023,
https://arxiv.org/abs/2309.14509). Masks, documents and dropout then work as in a single process.

Otherwise, an all-gather gives each rank the keys and values of whole rows, and the rank computes all heads for the
queries of its part. The backward sums the gradients of keys and values with a reduce-scatter (section 3.3.2 of "The
Llama 3 Herd of Models", 2024, https://arxiv.org/abs/2407.21783).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn

Collective = Callable[[Tensor, dist.ProcessGroup], Tensor]


class WithGroup:
    """An object with a process group, which cannot be copied: a deep copy of a model has the same object."""

    def __deepcopy__(self, memo: Any) -> Self:
        return self


@dataclass(frozen=True)
class Context(WithGroup):
    """The ranks that each take a part of every row; rows are padded at the end, so that all parts are equally long."""

    group: dist.ProcessGroup

    @property
    def size(self) -> int:
        return dist.get_world_size(self.group)

    def share(self, length: int) -> int:
        """Number of tokens per rank for a row of `length` tokens."""
        return -(-length // self.size)

    def place(self, length: int) -> slice:
        """Indices of this rank's part in a padded row of `length` tokens."""
        share, rank = self.share(length), dist.get_rank(self.group)
        return slice(rank * share, (rank + 1) * share)

    def padded(self, x: Tensor, value: int) -> Tensor:
        """Pad the last dimension, the length, at the end with `value` to a multiple of the number of ranks."""
        return nn.functional.pad(x, (0, self.share(x.shape[-1]) * self.size - x.shape[-1]), value=value)

    def part(self, x: Tensor, padding: int = 0) -> Tensor:
        """Return this rank's part [..., share] of a tensor [..., length]."""
        return self.padded(x, padding)[..., self.place(x.shape[-1])]

    def to_heads(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Exchange this rank's part of the sequence in all heads for the whole sequence in some heads.

        Shapes: [batch, heads, share, width] -> [batch, heads / ranks, length, width]. The number of query heads must be
        a multiple of the number of ranks. Key and value heads are repeated if their number is not such a multiple.
        """
        times = math.lcm(keys := key.shape[1], self.size) // keys
        if times > 1:
            key, value = key.repeat_interleave(times, 1), value.repeat_interleave(times, 1)
        query, key, value = (_AllToAll.apply(x, self.group) for x in (query, key, value))
        return query, key, value

    def to_parts(self, x: Tensor) -> Tensor:
        """Undo the exchange of `to_heads` for the attention output [batch, length, heads, width]."""
        return _AllToAll.apply(x, self.group)

    def whole(self, x: Tensor) -> Tensor:
        """Gather the parts of keys or values: [batch, heads, share, width] -> [batch, heads, length, width].

        In the backward, each rank gets the gradient of its own part, summed over the ranks.
        """
        return Gather.apply(x.transpose(1, 2), self.group).transpose(1, 2)

    def total(self, loss: Tensor) -> Tensor:
        """Sum the parts' losses over the ranks; in the backward, each rank gets the gradient of its own part."""
        return Reduce.apply(loss, self.group)


def differentiable(collective: Collective, transpose: Collective) -> type[torch.autograd.Function]:
    """Make an autograd function: the forward applies `collective`; the backward applies `transpose` to the gradient."""

    class Differentiable(torch.autograd.Function):  # torch.compile can trace static methods with closures
        @staticmethod
        def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
            ctx.group = group
            return collective(x, group)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
            return transpose(grad, ctx.group), None

    return Differentiable


def gathered(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the tensors of all ranks, stacked as [ranks, *]."""
    parts = x.new_empty(dist.get_world_size(group), *x.shape)
    dist.all_gather_single(parts.flatten(0, 1), x.contiguous(), group=group)
    return parts


def same(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return a view of `x`, because an autograd function should not return its input itself."""
    return x.view_as(x)


def summed(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sum over the ranks in new memory, because gradient checkpointing may still need `x`."""
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def joined(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[batch, part, *] of each rank -> [batch, length, *]."""
    return gathered(x, group).transpose(0, 1).reshape(x.shape[0], -1, *x.shape[2:])


def scatter_sum(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[batch, length, *] -> this rank's [batch, part, *] of the sum."""
    parts = x.unflatten(1, (dist.get_world_size(group), -1)).transpose(0, 1).contiguous()
    out = torch.empty_like(parts[0])
    dist.reduce_scatter_single(out, parts.flatten(0, 1), group=group)
    return out


def _exchange(x: Tensor, group: dist.ProcessGroup, cut: int, join: int) -> Tensor:
    """Split `x` along dimension `cut`, send a chunk to each rank, and concatenate the received chunks along `join`."""
    parts = torch.stack(x.chunk(dist.get_world_size(group), cut))
    out = torch.empty_like(parts)
    dist.all_to_all_single(out, parts, group=group)
    return torch.cat(out.unbind(), join)


_AllToAll = differentiable(partial(_exchange, cut=1, join=2), partial(_exchange, cut=2, join=1))
# Forward: gather the parts of a sequence. Backward: sum over the ranks, and each rank keeps its part.
Gather = differentiable(joined, scatter_sum)
# Forward: sum over the ranks. Backward: identity, because gradients are already equal on all ranks.
Reduce = differentiable(summed, same)
