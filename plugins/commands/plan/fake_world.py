"""A fake process group, for ranks that do not exist."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor


@contextmanager
def fake_world(world_size: int) -> Iterator[None]:
    """A fake process group of `world_size` ranks, this one the first; exchanges do nothing."""
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache
    from torch.testing._internal.distributed.fake_pg import FakeStore  # the import registers the backend

    assert not dist.is_initialized()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
        _clear_sharding_prop_cache()  # its results name meshes, of which the next world has equal ones


def grouped_mm(rows: Tensor, weights: Tensor, *, offs: Tensor) -> Tensor:
    """Replacement of torch's, which without values takes bf16 alone: all rows [n, in] times one of `weights`.

    Shapes, memory and FLOPs are those of groups of rows, each times its own weight [in, out].
    """
    with torch.autocast(rows.device.type, enabled=False):
        return rows @ weights[0]
