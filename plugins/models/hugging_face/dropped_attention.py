"""Causal attention with dropout on CPUs, where torch's fused kernel has none.

torch then holds three whole matrices of each head (probabilities, mask, product) and draws each element of the mask
from two random numbers. Here the queries go block by block over the keys that they see, two elements share a random
number, and the one matrix that is kept for the backward holds both: probabilities, negative where they are dropped.
"""

from typing import Any

import torch
from torch import Tensor

_QUERIES = 128  # of a block
_PART = 1 << 21  # elements of probabilities at a time, which stay in the processor's cache


def has_no_kernel(device: torch.device) -> bool:
    """Return True where torch has no fused attention with dropout, and nothing compiles one."""
    return device.type == "cpu" and not torch.compiler.is_compiling()


def dropped_attention(query: Tensor, key: Tensor, value: Tensor, scale: float, dropout: float) -> Tensor:
    """Dropout of softmax(scale * query @ key.T), causal, times value; all [batch, heads, length, width].

    The rate of dropout is rounded to a multiple of 2**-16. Saved for the backward, beside the arguments and the result:
    half of the matrix [length, length] of each head.
    """
    shape = query.shape
    query, key, value = (x.reshape(-1, *shape[2:]) for x in (query * scale, key, value))
    return _DroppedAttention.apply(query, key, value, round(dropout * 2**16)).view(shape)


def _blocks(shape: torch.Size) -> list[tuple[slice, slice, slice]]:
    """Heads, queries, and the keys that the last of these sees."""
    heads, length, _ = shape
    at_once = max(_PART // (min(_QUERIES, length) * length), 1)
    return [
        (slice(head, head + at_once), slice(start, stop), slice(stop))
        for head in range(0, heads, at_once)
        for start in range(0, length, _QUERIES)
        for stop in [min(start + _QUERIES, length)]
    ]


class _DroppedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, rate: int) -> Tensor:
        """Arguments [heads, length, width]; of 2**16 elements `rate` are dropped."""
        out, signed = torch.empty_like(query), []
        for heads, queries, seen in _blocks(query.shape):
            q, k = query[heads, queries], key[heads, seen].mT
            future = q.new_full((q.shape[1], k.shape[2]), -torch.inf).triu(queries.start + 1)
            # Selective checkpointing keeps what bmm returns, so it is not what a softmax is taken of.
            p = torch.softmax(torch.baddbmm(future, q, k), -1)
            draws = torch.empty(-(-p.numel() // 4), dtype=torch.int64).random_(-(2**63), None).view(torch.int16)
            # Signs and their clamps, because torch fills by a mask of booleans one element at a time.
            signs = draws[: p.numel()].view(p.shape).ge_(rate - 2**15).mul_(2).sub_(1).to(p.dtype)
            signed.append(torch.copysign(p, signs))
            out[heads, queries] = torch.bmm(signed[-1].clamp(min=0.0), value[heads, seen])
        ctx.kept = 1 - rate / 2**16
        out /= ctx.kept
        ctx.save_for_backward(query, key, value, out, *signed)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        query, key, value, out, *signed = ctx.saved_tensors
        exact = torch.promote_types(grad.dtype, torch.float32)
        # Of the gradient of a softmax's row, the sum of p * dp: dropout changes nothing (FlashAttention, Dao et al.,
        # 2022, appendix B.4).
        mean = (grad.to(exact) * out).sum(-1, keepdim=True).to(grad.dtype)
        grad = grad / ctx.kept
        grad_query = torch.empty_like(query)
        grad_key, grad_value = torch.zeros_like(key, dtype=exact), torch.zeros_like(value, dtype=exact)
        for (heads, queries, seen), p in zip(_blocks(query.shape), signed, strict=True):
            above = grad[heads, queries]
            grad_value[heads, seen] += torch.bmm(p.clamp(min=0.0).mT, above)
            change = torch.bmm(above, value[heads, seen].mT)
            change = torch.ops.aten.threshold_backward(change, p, 0.0)  # zero where p is not positive
            change.sub_(mean[heads, queries]).mul_(p.abs())
            grad_query[heads, queries] = torch.bmm(change, key[heads, seen])
            grad_key[heads, seen] += torch.bmm(change.mT, query[heads, queries])
        return grad_query, grad_key.to(key.dtype), grad_value.to(value.dtype), None
