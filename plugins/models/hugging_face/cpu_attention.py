"""Causal attention on CPUs, with or without dropout.

torch's fused CPU kernel does not support dropout. Without it, torch holds three full matrices per head (probabilities,
dropout mask, and their elementwise product) and draws two random numbers per element of the mask. This module processes
queries in blocks over their visible keys, and two elements share a random number. Only one matrix is kept for the
backward: the probabilities, with a negative sign where they are dropped.

In bf16, short sequences are faster here than in torch's kernel also without dropout: 256 tokens take 0.4 times as long.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

_QUERIES = 128  # queries per block
_PART = 1 << 21  # probabilities per block; small enough to stay in the CPU's cache
SHORT = 512  # tokens of a sequence whose matrices take little memory, compared with its other activations


def on_cpu(device: torch.device) -> bool:
    """Return True if this module's attention may be used: on a CPU, unless torch.compile is running."""
    return device.type == "cpu" and not torch.compiler.is_compiling()


def attention(query: Tensor, key: Tensor, value: Tensor, scale: float, dropout: float) -> Tensor:
    """Compute dropout(softmax(scale * query @ key.T)) @ value with a causal mask; all [batch, heads, length, width].

    The dropout rate is rounded to a multiple of 2**-16. For the backward, autograd saves the arguments, the result,
    and half of each head's [length, length] matrix.
    """
    shape = query.shape
    # Rotary positions may leave queries and keys in fp32 beside values in half precision.
    query, key = query.to(value.dtype), key.to(value.dtype)
    query, key, value = (x.reshape(-1, *shape[2:]) for x in (query, key, value))
    return _Attention.apply(query, key, value, scale, round(dropout * 2**16)).view(shape)


def _blocks(shape: torch.Size) -> Iterator[tuple[slice, slice, slice]]:
    """Yield the blocks as slices of heads, of queries, and of the keys visible to the block's last query."""
    heads, length, _ = shape
    at_once = max(_PART // (min(_QUERIES, length) * length), 1)
    for head in range(0, heads, at_once):
        for start in range(0, length, _QUERIES):
            stop = min(start + _QUERIES, length)
            yield slice(head, head + at_once), slice(start, stop), slice(stop)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, scale: float, rate: int) -> Tensor:
        """Compute the output; tensors are [heads, length, width], and the dropout rate is `rate` / 2**16."""
        out, signed = torch.empty_like(query), []
        for heads, queries, seen in _blocks(query.shape):
            q, k = query[heads, queries], key[heads, seen].mT
            future = q.new_full((q.shape[1], k.shape[2]), -torch.inf).triu(queries.start + 1)
            # Use baddbmm, because selective checkpointing would keep the results of bmm.
            p = torch.softmax(torch.baddbmm(future, q, k, alpha=scale), -1)
            if rate:
                draws = torch.empty(-(-p.numel() // 4), dtype=torch.int64).random_(-(2**63), None).view(torch.int16)
                # Signs and clamps are faster than boolean masks, because torch fills masked elements one by one.
                signs = draws[: p.numel()].view(p.shape).ge_(rate - 2**15).mul_(2).sub_(1).to(p.dtype)
                p = torch.copysign(p, signs)
            signed.append(p)
            out[heads, queries] = torch.bmm(p.clamp(min=0.0) if rate else p, value[heads, seen])
        ctx.scale, ctx.kept = scale, 1 - rate / 2**16
        out /= ctx.kept
        ctx.save_for_backward(query, key, value, out, *signed)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        query, key, value, out, *signed = ctx.saved_tensors
        exact = torch.promote_types(grad.dtype, torch.float32)
        # The sum of p * dp in the gradient of a softmax row equals the sum of grad * out, also with dropout
        # (FlashAttention, Dao et al., 2022, appendix B.4).
        mean = (grad.to(exact) * out).sum(-1, keepdim=True).to(grad.dtype)
        grad = grad / ctx.kept
        grad_query = torch.empty_like(query)
        grad_key, grad_value = torch.zeros_like(key, dtype=exact), torch.zeros_like(value, dtype=exact)
        for (heads, queries, seen), p in zip(_blocks(query.shape), signed, strict=True):
            above = grad[heads, queries]
            grad_value[heads, seen] += torch.bmm((p.clamp(min=0.0) if ctx.kept < 1 else p).mT, above)
            change = torch.bmm(above, value[heads, seen].mT)
            change = torch.ops.aten.threshold_backward(change, p, 0.0)  # zero where p is not positive
            change.sub_(mean[heads, queries]).mul_(p.abs()).mul_(ctx.scale)
            grad_query[heads, queries] = torch.bmm(change, key[heads, seen])
            grad_key[heads, seen] += torch.bmm(change.mT, query[heads, queries])
        return grad_query, grad_key.to(key.dtype), grad_value.to(value.dtype), None, None
