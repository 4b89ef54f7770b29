"""A backend for torch's process groups that sums floating-point numbers in a fixed tree."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllToAllOptions, Backend, ReduceOp, _create_work_from_future

from .partial_sums import PartialSums

BACKENDS = {"cpu": "tree", "cuda": "tree_nccl"}
_PASSED = (
    "broadcast", "allgather", "allgather_coalesced", "gather", "scatter", "alltoall", "all_to_all_single", "send",
    "recv", "recv_anysource", "barrier", "all_gather_single", "all_gather_single_coalesced", "monitored_barrier",
    "alltoall_base", "_allgather_base",
)  # fmt: skip


class Rounds:
    """The round of gradient accumulation to which the collectives of a backward belong.

    Round k of a step sums the gradients of micro batches k * ranks to (k + 1) * ranks - 1. An engine adds the results
    of its rounds one after the other. So all rounds except the last return zeros, and the last round returns the sum of
    all leaves.
    """

    def __init__(self) -> None:
        self.active = self.last = False
        self.number = self._call = 0
        self._sums: dict[tuple[int, int], PartialSums] = {}

    @contextmanager
    def __call__(self, number: int, last: bool) -> Iterator[None]:
        """Treat every sum over ranks in this block as a sum of gradients of round `number`."""
        self.active, self.number, self.last, self._call = True, number, last, 0
        try:
            yield
        finally:
            self.active = False

    def sums(self, backend: "TreeBackend") -> PartialSums:
        """Return the partial sums of the next collective in the backward; rounds call collectives in the same order."""
        self._call += 1
        return self._sums.setdefault((id(backend), self._call), PartialSums())


rounds = Rounds()


def _done(result: list[Tensor]) -> dist.Work:
    """Return the handle of a collective that is completed, or is queued on the current stream of a GPU."""
    devices = [result[0].device] if result[0].is_cuda else None
    future: torch.futures.Future[list[Tensor]] = torch.futures.Future(devices=devices)
    future.set_result(result)
    return _create_work_from_future(future)


class TreeBackend(Backend):
    """gloo or NCCL, except for sums of floating-point numbers.

    A sum is an all-to-all, a fixed tree over the ranks, and an all-gather, which send as many bytes as a ring. torch's
    own process group wraps it, so DDP, FSDP2, DTensor and DeepSpeed run on it unchanged.
    """

    supports_coalescing = False  # torch's property would call itself without end

    def __init__(self, inner: Backend, name: str) -> None:
        super().__init__(inner.rank(), inner.size())
        self.inner: Any = inner
        self._name = name

    def getBackendName(self) -> str:
        return self._name

    # ---- sums

    def allreduce(self, tensors: list[Tensor], opts: Any) -> dist.Work:
        (tensor,) = tensors
        if not _is_float_sum(tensor, opts.reduceOp):
            return self.inner.allreduce(tensors, opts)
        flat, size = tensor.reshape(-1), self.size()
        width = -(-flat.numel() // size)
        padded = torch.cat([flat, flat.new_zeros(width * size - flat.numel())])
        out = torch.empty_like(padded)
        self.inner._allgather_base(out, self._sum(list(padded.split(width)))).wait()
        tensor.copy_(out[: flat.numel()].view(tensor.shape))
        return _done(tensors)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any) -> dist.Work:
        for tensor in tensors:
            self.allreduce([tensor], opts)
        return _done(tensors)

    def reduce(self, tensors: list[Tensor], opts: Any) -> dist.Work:
        """Sum on all ranks; the caller reads the result on one of them."""
        if _is_float_sum(tensors[0], opts.reduceOp):
            return self.allreduce(tensors, opts)
        return self.inner.reduce(tensors, opts)

    def reduce_scatter_single(self, out: Tensor, given: Tensor, opts: Any) -> dist.Work:
        if not _is_float_sum(given, opts.reduceOp):
            return self.inner._reduce_scatter_base(out, given, opts)
        out.copy_(self._sum(list(given.reshape(-1).chunk(self.size()))).view(out.shape))
        return _done([out])

    _reduce_scatter_base = reduce_scatter_single

    def _sum(self, parts: list[Tensor]) -> Tensor:
        """Return the sum over the ranks of this rank's part; `parts` has one flat tensor of equal length per rank."""
        size, more = self.size(), rounds.active and not rounds.last  # more: other rounds of this step follow
        first, sums = (rounds.number * size, rounds.sums(self)) if rounds.active else (0, PartialSums())
        sent = torch.cat(parts)
        received = torch.empty_like(sent)
        self.inner.alltoall_base(received, sent, [], [], AllToAllOptions()).wait()
        for rank, leaf in enumerate(received.view(size, -1).unbind()):
            # Clone, because a kept view would keep the whole buffer allocated.
            sums.add((0, first + rank), leaf.clone() if more else leaf)
        total = torch.zeros_like(parts[0]) if more else sums.total()
        assert total is not None
        return total


def _passed(name: str) -> Any:
    return lambda self, *arguments, **named: getattr(self.inner, name)(*arguments, **named)


for _name in _PASSED:
    setattr(TreeBackend, _name, _passed(_name))


def _is_float_sum(tensor: Tensor, operation: Any) -> bool:
    """Return True for sums that depend on the order. Do not use `in`: ReduceOp's `==` is not symmetric."""
    if operation == ReduceOp.AVG:
        raise RuntimeError("a mean over ranks divides inexactly; sum instead")
    return tensor.is_floating_point() and bool(operation == ReduceOp.SUM)


def _made(engine: str, name: str, *arguments: Any) -> TreeBackend:
    """Create a group. engine: class in `torch.distributed`; builds of torch without CUDA have no NCCL."""
    return TreeBackend(getattr(dist, engine)(*arguments), name)


for _device, _engine in {"cpu": "ProcessGroupGloo", "cuda": "ProcessGroupNCCL"}.items():
    _name = BACKENDS[_device]
    if _name not in dist.Backend.backend_list:
        dist.Backend.register_backend(_name, partial(_made, _engine, _name), devices=[_device])
