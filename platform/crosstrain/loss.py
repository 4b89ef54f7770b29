"""Token cross-entropy that never holds all logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def token_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, vocab_size: int | None = None, chunk_tokens: int = 512
) -> Tensor:
    """Sum of cross-entropies."""
    vocab_size = weight.shape[0] if vocab_size is None else vocab_size
    flat = hidden.reshape(-1, hidden.shape[-1])
    return _Loss.apply(flat, weight, labels.reshape(-1), vocab_size, chunk_tokens)


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, vocab: int, chunk: int) -> Tensor:
        kind = hidden.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
        w = weight.to(dtype)
        need_h, need_w = ctx.needs_input_grad[:2]
        dh = torch.empty_like(hidden) if need_h else None
        dw = torch.zeros_like(weight) if need_w else None
        total = hidden.new_zeros((), dtype=torch.float32)
        with torch.autocast(kind, enabled=False):
            for start in range(0, len(hidden), chunk):
                h, y = hidden[start : start + chunk].to(dtype), labels[start : start + chunk]
                logits = (h @ w.T).float()
                logits[:, vocab:] = -torch.inf
                keep = y != -100
                target = torch.where(keep, y, 0).unsqueeze(1)
                lse = logits.logsumexp(1, keepdim=True)
                total += ((lse - logits.gather(1, target)).squeeze(1) * keep).sum()
                if need_h or need_w:
                    grad = logits.sub_(lse).exp_()
                    grad.scatter_add_(1, target, -torch.ones_like(target, dtype=grad.dtype))
                    grad *= keep.unsqueeze(1)
                    grad = grad.to(dtype)
                    if dh is not None:
                        dh[start : start + chunk] = grad @ w
                    if dw is not None:
                        dw += grad.T @ h
        ctx.save_for_backward(dh, dw)
        return total

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> Any:
        dh, dw = ctx.saved_tensors
        return (None if dh is None else dh * upstream), (None if dw is None else dw * upstream), None, None, None
