"""Flash attention computed as its arguments say, on a CPU: transformers loads it as a kernel from the Hub."""

from itertools import pairwise
from types import SimpleNamespace
from unittest.mock import patch

import torch
from crosstrain_plugins.builtin.models.hugging_face import attention
from torch import nn
from transformers.integrations import hub_kernels

CALLS: list[dict] = []  # arguments but tensors of data


def _sequence(q, k, v, dropout_p, softmax_scale, causal, window):
    """One sequence [length, heads, width], by products, in plain words of the published interface."""
    times = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(times, 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * (q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale)
    distance = torch.arange(len(q))[:, None] + len(k) - len(q) - torch.arange(len(k))
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    if causal:
        hidden |= distance < 0
    left, right = window
    if left >= 0:
        hidden |= distance > left
    if right >= 0:
        hidden |= distance < -right
    weights = nn.functional.dropout(scores.masked_fill(hidden, -torch.inf).softmax(-1), dropout_p)
    return torch.einsum("hqk,khd->qhd", weights, v)


def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    deterministic=False,
):
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    assert cu_seqlens_q[0] == 0
    assert cu_seqlens_q[-1] == len(q), "every token is in a sequence"
    assert max_seqlen_q == cu_seqlens_q.diff().max()
    assert max_seqlen_k == cu_seqlens_k.diff().max()
    CALLS.append({"cu_seqlens": cu_seqlens_q.tolist(), "longest": max_seqlen_q, "dropout_p": dropout_p})
    places = zip(pairwise(cu_seqlens_q.tolist()), pairwise(cu_seqlens_k.tolist()), strict=True)
    return torch.cat(
        [_sequence(q[a:b], k[c:d], v[c:d], dropout_p, softmax_scale, causal, window_size) for (a, b), (c, d) in places]
    )


def flash_attn_func(
    q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), deterministic=False
):
    CALLS.append({"dropout_p": dropout_p})
    rows = zip(q, k, v, strict=True)
    return torch.stack([_sequence(*row, dropout_p, softmax_scale, causal, window_size) for row in rows])


def varlen_without_dropout(  # as flash attention 3
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    deterministic=False,
):
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, 0.0, softmax_scale, causal, window_size
    )


def get_kernel(name, **_):
    varlen = flash_attn_varlen_func if name.endswith("flash-attn2") else varlen_without_dropout
    return SimpleNamespace(flash_attn_func=flash_attn_func, flash_attn_varlen_func=varlen)


def on_cpu():
    """Patches under which the machine seems to have the kernels."""
    return (
        patch.object(attention, "_missing", lambda flash: None),
        patch.object(hub_kernels, "is_kernels_available", lambda: True),
        patch.object(hub_kernels, "get_kernel", get_kernel),
    )
