"""A fake process group, to plan for ranks that do not exist."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor


@contextmanager
def fake_world(world_size: int) -> Iterator[None]:
    """Create a fake process group of `world_size` ranks, with this process as rank 0; collectives do nothing."""
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache
    from torch.testing._internal.distributed.fake_pg import FakeStore  # the import registers the backend

    assert not dist.is_initialized()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
        _clear_sharding_prop_cache()  # cached meshes would compare equal to meshes of the next world


def grouped_mm(rows: Tensor, weights: Tensor, *, offs: Tensor) -> Tensor:
    """Replace torch's grouped_mm, which accepts only bf16 fake tensors: multiply all rows by `weights[0]`.

    Shapes, memory and FLOPs are as in the real operation, which multiplies each group of rows [n, in] by its own
    weight [in, out].
    """
    with torch.autocast(rows.device.type, enabled=False):
        return rows @ weights[0]
