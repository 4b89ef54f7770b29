"""Data-parallel strategies: the part of each parameter that a rank updates, and how gradients are reduced to it.

The optimizer sees plain tensors that share memory with the model's: slices under tensor parallelism, flat ranges of
slices under ZeRO-1, rows of slices under FSDP. Gradients are summed over the data-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard

from crosstrain import Box, Group, Model, Piece, flat_range_pieces, fully_shard_experts

from .shard_spec import ShardSpec
from .tensor_parallel import local

MIB = 1 << 20
BYTES_PER_PARAMETER = 16  # weight, gradient and Adam's two moments, in fp32


@dataclass
class Share:
    """A parameter, and the part of it that this rank updates."""

    name: str  # the model's own
    parameter: nn.Parameter
    shape: torch.Size  # as the model was built, without a padding for the ranks' sake
    cuts: list[tuple[ShardSpec, int]]  # this rank's slice of a slice of the whole, and so on, with its number in each
    owned: nn.Parameter  # what the optimizer sees
    norm_weight: float  # of its squared gradient in the global norm's sum over all ranks
    summed: bool  # tensor-parallel ranks have parts of its gradient
    strategy: DDPStrategy  # exchanges its gradient
    start: int = 0  # where `owned` begins in the rank's slice: an index of the flattened one, or a row

    @property
    def slice_shape(self) -> tuple[int, ...]:
        return self.cuts[0][0].local if self.cuts else tuple(self.parameter.shape)

    def pieces(self, held: Tensor) -> list[Piece]:
        """`held`, laid out as `owned`, as pieces of the whole parameter."""
        pieces = self.strategy.pieces(self, held)
        for cut, rank in self.cuts:
            pieces = cut.whole(pieces, rank)
        return pieces


class DDPStrategy:
    """DDP: every data-parallel rank updates everything; gradients are summed in buckets while the backward runs."""

    gradient_divisor = 1  # gradients are divided by this where the sum over the ranks is meant

    def __init__(self, group: Group, bucket_mb: int) -> None:
        self.group, self.bucket_size = group, bucket_mb * MIB
        self.shares: list[Share] = []
        self.buckets: list[_Bucket] = []

    def over(self, group: Group) -> Self:
        """The same strategy over other ranks: those that hold the same experts."""
        return type(self)(group, self.bucket_size // MIB)

    def own(self, parameter: nn.Parameter) -> tuple[Tensor, int]:
        """The part of a parameter that this rank updates, in the same memory, and its start in the rank's slice."""
        return local(parameter.detach()), 0

    def pieces(self, share: Share, held: Tensor) -> list[Piece]:
        """`held`, laid out as `share.owned`, as pieces of the rank's slice."""
        return [Piece(Box.whole(share.slice_shape), held.detach())]

    def watch(self, shares: list[Share]) -> None:
        """Register the parameters whose gradients are exchanged from now on."""
        self.shares = [share for share in shares if share.parameter.requires_grad]
        if self.group.size == 1:
            return
        room = 0
        for share in reversed(self.shares):  # gradients are ready in about this order
            size = local(share.parameter.detach()).numel() * share.parameter.element_size()
            if not self.buckets or room < size:
                self.buckets.append(_Bucket([]))
                room = self.bucket_size
            room -= size
            bucket = self.buckets[-1]
            bucket.shares.append(share)
            share.parameter.register_post_accumulate_grad_hook(partial(self._accumulated, bucket))

    def start(self, backwards: int) -> None:
        """Begin a step of `backwards` backward passes."""
        for bucket in self.buckets:
            bucket.awaited = backwards * len(bucket.shares)
            bucket.finish = None

    def _accumulated(self, bucket: _Bucket, _: nn.Parameter) -> None:
        bucket.awaited -= 1
        if bucket.awaited == 0:
            for candidate in self.buckets:  # in one order on all ranks
                if candidate.awaited:
                    return
                if candidate.finish is None:
                    candidate.finish = self._exchange(candidate.shares)

    def reduce_grads(self) -> None:
        """Wait until every `owned` has its gradient."""
        if self.group.size == 1:
            return self._hand_over()
        for bucket in self.buckets:
            if bucket.finish is None:  # some parameter had no part in some forward
                bucket.finish = self._exchange(bucket.shares)
        for bucket in self.buckets:
            finish, bucket.finish = bucket.finish, None  # which holds on to what was sent
            assert finish is not None
            finish()

    def _hand_over(self) -> None:
        """Give each `owned` the gradient of its parameter."""
        for share in self.shares:
            gradient, share.parameter.grad = share.parameter.grad, None
            share.owned.grad = None if gradient is None else local(gradient).reshape(share.owned.shape)

    def _exchange(self, shares: list[Share]) -> Callable[[], None]:
        """Begin to sum the gradients of a bucket; the returned function waits for them."""
        flat = torch.cat([_take_gradient(share).reshape(-1) for share in shares])
        work = dist.all_reduce(flat, group=self.group.process_group, async_op=True)

        def finish() -> None:
            work.wait()
            sizes = [share.owned.numel() for share in shares]
            for share, gradient in zip(shares, flat.split(sizes), strict=True):
                share.owned.grad = gradient.view_as(share.owned)

        return finish

    def sync_params(self) -> None:
        """Send updated parameters to the ranks that compute with them; called after each update."""


@dataclass
class _Bucket:
    shares: list[Share]
    awaited: int = 0  # gradients that have yet to be accumulated in this step
    finish: Callable[[], None] | None = None  # once the exchange has begun


class ZeRO1Strategy(DDPStrategy):
    """ZeRO-1: each data-parallel rank has the optimizer's state of a range of every flattened slice."""

    def _range(self, numel: int) -> tuple[int, int]:
        """Elements of each rank's range, and this rank's first one."""
        width = -(-numel // self.group.size)
        return width, min(self.group.rank * width, numel)

    def own(self, parameter: nn.Parameter) -> tuple[Tensor, int]:
        if not parameter.requires_grad:
            return super().own(parameter)
        flat = local(parameter.detach()).view(-1)
        width, start = self._range(flat.numel())
        return flat.narrow(0, start, min(width, flat.numel() - start)), start

    def pieces(self, share: Share, held: Tensor) -> list[Piece]:
        if not share.parameter.requires_grad:
            return super().pieces(share, held)
        return flat_range_pieces(held, share.slice_shape, share.start)

    def _exchange(self, shares: list[Share]) -> Callable[[], None]:
        rows = [self._padded(_take_gradient(share)) for share in shares]
        widths = [row.shape[1] for row in rows]
        everybody = torch.cat(rows, dim=1)
        del rows
        mine = torch.empty_like(everybody[0])
        work = dist.reduce_scatter_single(mine, everybody.view(-1), group=self.group.process_group, async_op=True)

        def finish() -> None:
            work.wait()
            for share, gradient in zip(shares, mine.split(widths), strict=True):
                share.owned.grad = gradient[: share.owned.numel()]

        return finish

    def _padded(self, tensor: Tensor) -> Tensor:
        """The ranges of all ranks, [ranks, width], the last ones padded."""
        flat = tensor.reshape(-1)
        width, _ = self._range(flat.numel())
        return nn.functional.pad(flat, (0, width * self.group.size - flat.numel())).view(self.group.size, width)

    def sync_params(self) -> None:
        for bucket in self.buckets:
            slices = [local(share.parameter.detach()) for share in bucket.shares]
            widths = [self._range(tensor.numel())[0] for tensor in slices]
            mine = slices[0].new_zeros(sum(widths))
            for share, place in zip(bucket.shares, mine.split(widths), strict=True):
                place[: share.owned.numel()] = share.owned.detach()
            everybody = mine.new_empty(self.group.size, len(mine))
            dist.all_gather_single(everybody.view(-1), mine, group=self.group.process_group)
            for tensor, ranges in zip(slices, everybody.split(widths, dim=1), strict=True):
                tensor.copy_(ranges.reshape(-1)[: tensor.numel()].view_as(tensor))


def _take_gradient(share: Share) -> Tensor:
    """This rank's gradient, no longer the parameter's."""
    gradient, share.parameter.grad = share.parameter.grad, None
    return torch.zeros_like(local(share.parameter.detach())) if gradient is None else local(gradient)


def sum_gradients(gradients: list[Tensor | None], group: dist.ProcessGroup | None) -> None:
    """Sum gradients over the ranks of a group, in place, in one exchange."""
    present = [gradient for gradient in gradients if gradient is not None and gradient.numel()]
    if not present or group is None:
        return
    flat = torch.cat([gradient.reshape(-1) for gradient in present])
    dist.all_reduce(flat, group=group)
    for gradient, summed in zip(present, flat.split([g.numel() for g in present]), strict=True):
        gradient.copy_(summed.view_as(gradient))


def needs_host_memory(numel: int, free: int) -> bool:
    """True where the state of a rank's `numel` parameters takes over 70% of a device's `free` bytes.

    The rest is for activations and gathered blocks, whose size is not known beforehand.
    """
    return numel * BYTES_PER_PARAMETER > 0.7 * free


def shard_parameters(model: Model, mesh: DeviceMesh, of_experts: DeviceMesh | None, offload: bool) -> None:
    """Shard every block, and then the rest of the model, over the ranks of `mesh`; experts over those `of_experts`."""
    pin = mesh.device_type == "cuda"
    policy = CPUOffloadPolicy(pin_memory=pin) if offload else OffloadPolicy()
    if of_experts is not None:
        fully_shard_experts(model, of_experts, mesh.size(), offload_policy=policy)
    for block in model.blocks():
        if next(block.parameters(), None) is not None:  # else it lies on another stage
            fully_shard(block, mesh=mesh, offload_policy=policy)
    fully_shard(model, mesh=mesh, offload_policy=policy)


class FSDPStrategy(DDPStrategy):
    """FSDP: every data-parallel rank has rows of each slice; torch gathers them to compute, and averages gradients."""

    def __init__(self, group: Group, model: Model) -> None:
        super().__init__(group, bucket_mb=1)
        self.model = model
        self.gradient_divisor = group.size

    def over(self, group: Group) -> Self:
        return type(self)(group, self.model)

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

    def reduce_grads(self) -> None:
        self.reshard()  # a frozen stage has had no backward that would
        for share in self.shares:
            share.owned.data = local(share.parameter.detach())  # FSDP may have moved it when it began
        self._hand_over()

    def reshard(self) -> None:
        """Free parameters that a forward without a backward has left gathered."""
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


def free_memory(device: torch.device) -> int:
    """Bytes that are free on a GPU."""
    return torch.cuda.mem_get_info(device)[0]
