"""FSDP2 beside tensor parallelism: data-parallel ranks share the slices too, in host memory if that is wanted."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard

from crosstrain.checkpoint.boxes import Box, Piece
from crosstrain.distributed.group import Group
from crosstrain.modeling.base import Model

from .layers import local
from .ownership import Copies, Share

BYTES_PER_PARAMETER = 16  # weight, gradient and Adam's two moments, in fp32


def needs_host_memory(numel: int, free: int) -> bool:
    """Whether the state of a rank's `numel` parameters takes over 70% of a device's `free` bytes.

    The rest is for activations and gathered blocks, which nobody knows beforehand.
    """
    return numel * BYTES_PER_PARAMETER > 0.7 * free


def shard(model: Model, mesh: DeviceMesh, offload: bool) -> None:
    """Spread every block, and then what is left, over the ranks of `mesh`."""
    pin = mesh.device_type == "cuda"
    policy = CPUOffloadPolicy(pin_memory=pin) if offload else OffloadPolicy()
    for block in model.blocks():
        if next(block.parameters(), None) is not None:  # else it lies on another stage
            fully_shard(block, mesh=mesh, offload_policy=policy)
    fully_shard(model, mesh=mesh, offload_policy=policy)


class FullShards(Copies):
    """Every data-parallel rank has rows of each slice; FSDP gathers them to compute, and averages gradients."""

    def __init__(self, group: Group, model: Model) -> None:
        super().__init__(group, bucket_mb=1)
        self.model = model
        self.gradient_divisor = group.size

    def own(self, parameter: nn.Parameter) -> tuple[Tensor, int]:
        return local(parameter.detach()), 0

    def watch(self, shares: list[Share]) -> None:
        self.shares = [share for share in shares if share.parameter.requires_grad]
        for share in shares:
            rows = -(-share.slice_shape[0] // self.group.size)  # as torch.chunk cuts
            share.start = min(self.group.rank * rows, share.slice_shape[0])

    def pieces(self, share: Share, held: Tensor) -> list[Piece]:
        if not held.numel():
            return []
        offset = (share.start, *[0] * (held.ndim - 1))
        return [Piece(Box(offset, tuple(held.shape)), held.detach())]

    def before_backward(self, last: bool) -> None:
        """Exchange gradients in the last backward of a step alone."""
        assert isinstance(self.model, FSDPModule)
        self.model.set_requires_gradient_sync(last)
        self.model.set_is_last_backward(last)

    def finish(self) -> None:
        self.reshard()  # a frozen stage has had no backward that would
        for share in self.shares:
            share.owned.data = local(share.parameter.detach())  # FSDP may have moved it when it began
            gradient, share.parameter.grad = share.parameter.grad, None
            share.owned.grad = None if gradient is None else local(gradient)

    def reshard(self) -> None:
        """After a forward without a backward: put what is still gathered back into its shards."""
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


def free_memory(device: torch.device) -> int:
    """Bytes that are free on a GPU."""
    return torch.cuda.mem_get_info(device)[0]
