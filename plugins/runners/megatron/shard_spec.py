"""Shard specs: the position of a rank's slice in the full parameter."""

from dataclasses import dataclass

from torch.distributed.tensor import Placement, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from crosstrain import Box, Piece


@dataclass(frozen=True)
class ShardSpec:
    """A parameter of shape `full`, sharded along `dim` over `size` ranks.

    With several `parts`, such as queries, keys and values in one matrix, each part is sharded separately, and a rank
    holds its slices of the parts concatenated.
    """

    full: tuple[int, ...]
    dim: int
    size: int
    parts: int = 1

    def __post_init__(self) -> None:
        assert self.full[self.dim] % (self.size * self.parts) == 0, self

    @property
    def local(self) -> tuple[int, ...]:
        """Return the shape of a rank's slice."""
        return tuple(n // self.size if d == self.dim else n for d, n in enumerate(self.full))

    @property
    def placement(self) -> Placement:
        return Shard(self.dim) if self.parts == 1 else _StridedShard(self.dim, split_factor=self.parts)

    def whole(self, pieces: list[Piece], rank: int) -> list[Piece]:
        """Convert pieces of the slice of `rank` to pieces of the full parameter."""
        width = self.full[self.dim] // (self.size * self.parts)  # rows or columns of a rank's slice of one part
        out = []
        for piece in pieces:
            first, count = piece.box.offset[self.dim], piece.box.shape[self.dim]
            for part in range(self.parts):
                low, high = max(first, part * width), min(first + count, (part + 1) * width)
                if low < high:
                    offset, shape = list(piece.box.offset), list(piece.box.shape)
                    offset[self.dim] = (part * self.size + rank) * width + low - part * width
                    shape[self.dim] = high - low
                    data = piece.data.narrow(self.dim, low - first, high - low)
                    out.append(Piece(Box(tuple(offset), tuple(shape)), data))
        return out
