"""Data-parallel strategies: they choose the part of each parameter that a rank updates, and reduce gradients.

The optimizer updates plain tensors that share memory with the model's parameters: slices under tensor parallelism, flat
ranges of slices under ZeRO-1, rows of slices under FSDP. Gradients are summed over the data-parallel ranks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard

from crosstrain import Box, Group, Model, Piece, flat_range_pieces

from ..sharding import reshard
from .plan import ShardSpec
from .tensor_parallel import local

MIB = 1 << 20


@dataclass
class Share:
    """A parameter and the part of it that this rank updates."""

    name: str  # name in the model
    parameter: nn.Parameter
    shape: torch.Size  # shape in the model as built; no padding that depends on the number of ranks
    cuts: list[tuple[ShardSpec, int]]  # nested shardings, innermost first, each with this rank's index in it
    owned: nn.Parameter  # the part that the optimizer updates
    norm_weight: float  # weight of the squared gradient norm in the sum over all ranks
    summed: bool  # True: each tensor-parallel rank computes a partial gradient
    strategy: "DDPStrategy"  # strategy that reduces the gradient
    start: int = 0  # first element of `owned` in the rank's slice: a flat index, or a row under FSDP

    @property
    def slice_shape(self) -> tuple[int, ...]:
        return self.cuts[0][0].local if self.cuts else tuple(self.parameter.shape)

    def pieces(self, held: Tensor) -> list[Piece]:
        """Return `held`, laid out like `owned`, as pieces of the full parameter."""
        pieces = self.strategy.pieces(self, held)
        for cut, rank in self.cuts:
            pieces = cut.whole(pieces, rank)
        return pieces


class DDPStrategy:
    """DDP: every data-parallel rank updates all parameters; gradients are summed in buckets during the backward."""

    gradient_divisor = 1  # reduced gradients are the sum over the ranks, divided by this number

    def __init__(self, group: Group, bucket_mb: int) -> None:
        self.group, self.bucket_size = group, bucket_mb * MIB
        self.shares: list[Share] = []
        self.buckets: list[_Bucket] = []

    def own(self, parameter: nn.Parameter) -> tuple[Tensor, int]:
        """Return a view of the part of a parameter that this rank updates, and its start in the rank's slice."""
        return local(parameter.detach()), 0

    def pieces(self, share: Share, held: Tensor) -> list[Piece]:
        """Return `held`, laid out like `share.owned`, as pieces of the rank's slice."""
        return [Piece(Box.whole(share.slice_shape), held.detach())]

    def watch(self, shares: list[Share]) -> None:
        """Register trainable shares, and hook their parameters so that gradients are reduced."""
        self.shares = [share for share in shares if share.parameter.requires_grad]
        if self.group.size == 1:
            return
        room = 0
        for share in reversed(self.shares):  # gradients become ready in about this order
            size = local(share.parameter.detach()).numel() * share.parameter.element_size()
            if not self.buckets or room < size:
                self.buckets.append(_Bucket([]))
                room = self.bucket_size
            room -= size
            bucket = self.buckets[-1]
            bucket.shares.append(share)
            share.parameter.register_post_accumulate_grad_hook(partial(self._accumulated, bucket))

    def start(self, backwards: int) -> None:
        """Begin a step with `backwards` backward passes."""
        for bucket in self.buckets:
            bucket.awaited = backwards * len(bucket.shares)
            bucket.finish = None

    def _accumulated(self, bucket: "_Bucket", _: nn.Parameter) -> None:
        bucket.awaited -= 1
        if bucket.awaited == 0:
            for candidate in self.buckets:  # all ranks must launch collectives in the same order
                if candidate.awaited:
                    return
                if candidate.finish is None:
                    candidate.finish = self._exchange(candidate.shares)

    def before_backward(self, last: bool) -> None:
        """Called before each backward; `last` is True for the last backward of a step."""

    def reshard(self) -> None:
        """Free parameters that are still gathered after a forward without a backward."""

    def reduce_grads(self) -> None:
        """Wait for the reductions, and set the gradient of `owned` in every share."""
        if self.group.size == 1:
            return self._hand_over()
        for bucket in self.buckets:
            if bucket.finish is None:  # a micro batch did not use all parameters of the bucket
                bucket.finish = self._exchange(bucket.shares)
        for bucket in self.buckets:
            finish, bucket.finish = bucket.finish, None  # the closure would keep the sent buffer allocated
            assert finish is not None
            finish()

    def _hand_over(self) -> None:
        """Move each parameter's gradient to `owned` of its share."""
        for share in self.shares:
            gradient, share.parameter.grad = share.parameter.grad, None
            share.owned.grad = None if gradient is None else local(gradient).reshape(share.owned.shape)

    def _exchange(self, shares: list[Share]) -> Callable[[], None]:
        """Start the reduction of a bucket's gradients; the returned function waits for it and sets the gradients."""
        flat = torch.cat([_take_gradient(share).reshape(-1) for share in shares])
        work = dist.all_reduce(flat, group=self.group.process_group, async_op=True)
        return partial(_deliver, work, shares, flat.split([share.owned.numel() for share in shares]))

    def sync_params(self) -> None:
        """Send updated parameters to the ranks that compute with them. Called after each update."""


@dataclass
class _Bucket:
    shares: list[Share]
    awaited: int = 0  # gradients still to be accumulated in this step
    finish: Callable[[], None] | None = None  # waits for the reduction; None: not started


class ZeRO1Strategy(DDPStrategy):
    """ZeRO-1: each data-parallel rank holds the optimizer state of one range of every flattened slice."""

    def _range(self, numel: int) -> tuple[int, int]:
        """Return the length of each rank's range, and the index of this rank's first element."""
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
        return partial(_deliver, work, shares, mine.split(widths))

    def _padded(self, tensor: Tensor) -> Tensor:
        """Return the ranges of all ranks as [ranks, width], with zeros after the last element."""
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


def _deliver(work: dist.Work, shares: list[Share], gradients: Sequence[Tensor]) -> None:
    """Wait for a reduction, and set the gradient of each share; a gradient may have padding at its end."""
    work.wait()
    for share, gradient in zip(shares, gradients, strict=True):
        share.owned.grad = gradient[: share.owned.numel()].view_as(share.owned)


def _take_gradient(share: Share) -> Tensor:
    """Remove this rank's gradient from the parameter and return it; zeros if the parameter has no gradient."""
    gradient, share.parameter.grad = share.parameter.grad, None
    return torch.zeros_like(local(share.parameter.detach())) if gradient is None else local(gradient)


def sum_gradients(gradients: list[Tensor | None], group: dist.ProcessGroup | None) -> None:
    """Sum gradients over the ranks of a group, in place, in one all-reduce."""
    present = [gradient for gradient in gradients if gradient is not None and gradient.numel()]
    if not present or group is None:
        return
    flat = torch.cat([gradient.reshape(-1) for gradient in present])
    dist.all_reduce(flat, group=group)
    for gradient, summed in zip(present, flat.split([g.numel() for g in present]), strict=True):
        gradient.copy_(summed.view_as(gradient))


def shard_parameters(model: Model, mesh: DeviceMesh, of_experts: DeviceMesh | None, offload: bool) -> None:
    """Apply fully_shard over `mesh` to every block and then to the model, and over `of_experts` to the experts.

    The experts' gradients are already summed over the expert-parallel ranks. To average gradients over the copies of
    the model, FSDP therefore divides by the number of copies.
    """
    policy = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if offload else OffloadPolicy()
    if of_experts is not None:
        for experts in model.structure.experts().values():
            fully_shard(experts, mesh=of_experts, offload_policy=policy)
            experts.set_gradient_divide_factor(float(mesh.size()))
            if of_experts.size() > 1:  # gloo cannot average; on a single rank torch 2.14 would divide twice
                experts.set_force_sum_reduction_for_comms(True)
    for block in model.blocks():
        if next(block.parameters(), None) is not None:  # blocks of other stages have no parameters
            fully_shard(block, mesh=mesh, offload_policy=policy)
    fully_shard(model, mesh=mesh, offload_policy=policy)


class FSDPStrategy(DDPStrategy):
    """FSDP: each data-parallel rank holds rows of each slice; torch gathers them to compute, and averages gradients."""

    def __init__(self, group: Group, model: Model) -> None:
        super().__init__(group, bucket_mb=1)
        self.model = model
        self.gradient_divisor = group.size

    def watch(self, shares: list[Share]) -> None:
        self.shares = [share for share in shares if share.parameter.requires_grad]
        for share in shares:
            rows = -(-share.slice_shape[0] // self.group.size)  # same split as torch.chunk
            share.start = min(self.group.rank * rows, share.slice_shape[0])

    def pieces(self, share: Share, held: Tensor) -> list[Piece]:
        if not held.numel():
            return []
        return [Piece(Box((share.start, *[0] * (held.ndim - 1)), tuple(held.shape)), held.detach())]

    def before_backward(self, last: bool) -> None:
        """Reduce gradients only in the last backward of a step."""
        assert isinstance(self.model, FSDPModule)
        self.model.set_requires_gradient_sync(last)
        self.model.set_is_last_backward(last)

    def reduce_grads(self) -> None:
        self.reshard()  # a frozen stage runs no backward, so FSDP did not reshard it
        for share in self.shares:
            share.owned.data = local(share.parameter.detach())  # FSDP's lazy initialization may move the parameter
        self._hand_over()

    def reshard(self) -> None:
        reshard(self.model)
