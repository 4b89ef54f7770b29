"""Reduce-scatter for stage 3: gradients are sent in bf16 and summed in fp32, so the sum is not rounded to bf16."""

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def reduce_scatter(tensors: list[Tensor], group: Any) -> list[Tensor]:
    """Return the mean over the ranks of this rank's part of each tensor, in fp32; replaces a DeepSpeed function."""
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    cut = [tensor.flatten().split(max(1, math.ceil(tensor.numel() / size))) for tensor in tensors]
    parts = [torch.cat([pieces[r] if r < len(pieces) else pieces[0][:0] for pieces in cut]) for r in range(size)]
    mine = parts[rank].numel()
    received = parts[0].new_empty(size * mine)
    dist.all_to_all_single(received, torch.cat(parts), [mine] * size, [part.numel() for part in parts], group=group)
    mean = received.view(size, mine).sum(0, dtype=torch.float32) / size
    return list(mean.split([pieces[rank].numel() if rank < len(pieces) else 0 for pieces in cut]))
