"""The global gradient norm, in float64, because it is compared across runners and decides how much is clipped."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate

_BLOCK = 4096


def global_norm(tensors: list[Tensor]) -> float:
    """2-norm of all elements of all tensors; DTensors count once, however they are sharded. Collective for DTensors."""
    groups: dict[Any, list[Tensor]] = {}
    for tensor in tensors:
        spread = (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else None
        groups.setdefault(spread, []).append(tensor.to_local() if isinstance(tensor, DTensor) else tensor)
    total = 0.0
    for spread, group in groups.items():
        square = _square(group)
        if spread is not None:
            mesh, placements = spread
            parts = [Replicate() if placement.is_replicate() else Partial() for placement in placements]
            square = DTensor.from_local(square, mesh, parts).full_tensor()
        total += square.item()
    return total**0.5


def _square(tensors: list[Tensor]) -> Tensor:
    """Sum of squares of plain tensors on one device, a float64 scalar."""
    if tensors[0].device.type != "cpu":
        return torch.stack(torch._foreach_norm(tensors)).double().square().sum()
    # On a CPU torch sums a norm in a few fp32 numbers: off by 1e-6 at 10^5 elements and by 1e-3 at 10^7.
    total = torch.zeros((), dtype=torch.float64)
    for tensor in tensors:
        flat = tensor.reshape(-1)
        whole = flat.numel() - flat.numel() % _BLOCK
        total += torch.linalg.vector_norm(flat[:whole].view(-1, _BLOCK), dim=1).double().square().sum()
        total += torch.linalg.vector_norm(flat[whole:]).double().square()
    return total
