"""A global 2-norm that does not depend on the order or the sharding of the elements."""

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from crosstrain import Group

_BITS = 30  # bits of a square in each of the two bins
_BLOCK = 1 << 18  # elements at a time; a block of squares stays in the processor's cache


def exact_norm(tensors: Iterable[Tensor], group: Group) -> float:
    """Return the 2-norm of fp32 tensors; each rank of `group` holds different elements. Collective.

    The square of an fp32 number is exact in fp64. Each square is split into two whole numbers, in units that depend
    only on the largest exponent of all elements; sums of whole numbers do not depend on their order. Each square is
    rounded to a multiple of about 2**-60 times the largest square. (Demmel and Nguyen, "Fast reproducible
    floating-point summation", 2013, use such bins.)
    """
    flat = [tensor.detach().reshape(-1) for tensor in tensors if tensor.numel()]
    device = flat[0].device if flat else torch.device("cpu")
    largest = torch.stack([t.abs().amax() for t in flat] or [torch.zeros((), device=device)]).amax().double()
    if group.process_group is not None:
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group.process_group)
    top = largest.item()
    if not math.isfinite(top) or top == 0.0:
        return abs(top)
    unit = 2.0 ** (2 * math.frexp(top)[1] - _BITS)  # every square is below 2**30 units
    bins = torch.zeros(2, dtype=torch.int64, device=device)
    for block in (block for tensor in flat for block in tensor.split(_BLOCK)):
        units = block.double().square_().mul_(1 / unit)
        whole = units.floor()
        bins[0] += whole.sum().long()  # below 2**48, so exact in fp64
        bins[1] += units.sub_(whole).mul_(2.0**_BITS).round_().sum().long()
    if group.process_group is not None:
        dist.all_reduce(bins, group=group.process_group)
    high, low = bins.tolist()
    return math.sqrt(math.ldexp(float((high << _BITS) + low), -_BITS) * unit)
