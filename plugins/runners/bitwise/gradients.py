"""Sums of gradients over micro batches and ranks, for runners whose ranks compute whole gradients."""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

from crosstrain import Group

from ..megatron.data_parallel import sum_gradients
from .partial_sums import PartialSums, nodes_of

_BUCKET = 25 << 20  # bytes of gradients that are exchanged together


class WholeGradients:
    """The gradients of a step, summed in a fixed tree over the micro batches of all ranks.

    Rank r computes micro batches r * count to (r + 1) * count - 1 of a step. They are those of `sources` ranks, one
    after the other, if the parameters are experts that other ranks send tokens to. `context` are the ranks with the
    other parts of this rank's sequences.
    """

    def __init__(self, parameters: list[nn.Parameter], group: Group, context: Group, sources: int = 1) -> None:
        self.group, self.context, self.sources = group, context, sources
        self.count, self._leaf = 0, [0] * sources
        self._parts = {parameter: [PartialSums() for _ in range(sources)] for parameter in parameters}
        self._sums = {parameter: parts[0] for parameter, parts in self._parts.items()}

    def begin_step(self, count: int) -> None:
        """Begin a step of `count` micro batches of each source."""
        self.count = self.sources * count
        self._leaf = [self.group.rank * self.count + source * count for source in range(self.sources)]

    def take(self, source: int = 0) -> None:
        """Move the gradients of a source's next micro batch from the parameters into the sums."""
        sum_gradients([parameter.grad for parameter in self._parts], self.context.process_group)
        for parameter, parts in self._parts.items():
            parts[source].add((0, self._leaf[source]), parameter.grad)
            parameter.grad = None
        self._leaf[source] += 1

    def finish(self) -> None:
        """Set the parameters' gradients to the sums over the micro batches of all ranks. Collective."""
        for first, *others in self._parts.values():
            for node in (node for sums in others for node in sums.take()):
                first.add(*node)
        if self.group.size == 1:
            for parameter, sums in self._sums.items():
                total = sums.total()
                parameter.grad = torch.zeros_like(parameter) if total is None else total
            return
        for bucket in self._buckets():
            gradients = self._exchanged(bucket).split([parameter.numel() for parameter in bucket])
            for parameter, gradient in zip(bucket, gradients, strict=True):
                parameter.grad = gradient.view_as(parameter)

    def _buckets(self) -> Iterator[list[nn.Parameter]]:
        """Yield lists of parameters of one dtype, in order, of up to `_BUCKET` bytes or a single larger parameter."""
        bucket, size = list[nn.Parameter](), 0
        for parameter in self._sums:
            if bucket and (parameter.dtype != bucket[0].dtype or size + parameter.nbytes > _BUCKET):
                yield bucket
                bucket, size = [], 0
            bucket.append(parameter)
            size += parameter.nbytes
        if bucket:
            yield bucket

    def _exchanged(self, bucket: list[nn.Parameter]) -> Tensor:
        """Return a bucket's sums, flat: each rank receives all nodes of one part, adds them, and sends the sum to all.

        If `count` is a power of two, ranks send as many bytes as in a ring; otherwise more, because a rank has several
        nodes.
        """
        size, process_group = self.group.size, self.group.process_group
        numel = sum(parameter.numel() for parameter in bucket)
        width = -(-numel // size)
        counts = [len(nodes_of(rank * self.count, self.count)) for rank in range(size)]
        sent = bucket[0].new_zeros(counts[self.group.rank], size * width)
        sizes = [parameter.numel() for parameter in bucket]
        for at, row in enumerate(sent):
            for parameter, part in zip(bucket, row[:numel].split(sizes), strict=True):
                if (value := self._sums[parameter].nodes[at][1]) is not None:
                    part.copy_(value.flatten())
        for parameter in bucket:
            self._sums[parameter].nodes.clear()
        received = sent.new_empty(sum(counts), width)
        dist.all_to_all_single(
            received.view(-1),
            sent.view(-1, size, width).transpose(0, 1).flatten(),
            [count * width for count in counts],
            [counts[self.group.rank] * width] * size,
            group=process_group,
        )
        sums, rows = PartialSums(), iter(received)
        for rank in range(size):
            for node in nodes_of(rank * self.count, self.count):
                sums.add(node, next(rows))
        out = sent.new_empty(size * width)
        dist.all_gather_into_tensor(out, sums.total(), group=process_group)
        return out[:numel]
