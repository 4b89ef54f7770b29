"""Exchanges of tensor-parallel ranks in a forward, each with its transpose in the backward.

The pairs are Megatron-LM's (Shoeybi et al., 2019; Korthikanti et al., 2022). Activations are [batch, length, width].
Called through torch.distributed, so that the watchdog sees them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Grad = tuple[Tensor, None]


class Copy(torch.autograd.Function):
    """The identity; gradients are summed over the ranks, each of which used its copy in another way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Grad:
        return _sum(grad.clone(), ctx.group), None


class Reduce(torch.autograd.Function):
    """The sum over the ranks; gradients are the same everywhere already.

    In memory of its own, because gradient checkpointing may keep `x`.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        return _sum(x.clone(), group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Grad:
        return grad, None


class Gather(torch.autograd.Function):
    """All of a sequence of which each rank has a part; gradients are summed, and each rank gets its part of them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _gather(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Grad:
        return _scatter_sum(grad, ctx.group), None


class ReduceScatter(torch.autograd.Function):
    """This rank's part, along the sequence, of the sum over the ranks; gradients are gathered."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _scatter_sum(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Grad:
        return _gather(grad, ctx.group), None


class Split(torch.autograd.Function):
    """This rank's part of a sequence that all ranks have; gradients are gathered."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _part(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Grad:
        return _gather(grad, ctx.group), None


class Unsplit(torch.autograd.Function):
    """All of a sequence of which each rank has a part; gradients are the same everywhere, and each takes its part."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _gather(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Grad:
        return _part(grad, ctx.group), None


def _sum(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    assert x.is_contiguous()
    dist.all_reduce(x, group=group)
    return x


def _part(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[batch, length, width] -> this rank's [batch, part, width]."""
    return x.chunk(dist.get_world_size(group), dim=1)[dist.get_rank(group)].contiguous()


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
