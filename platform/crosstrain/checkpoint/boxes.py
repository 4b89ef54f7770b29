"""Boxes describe the parts of tensors that ranks hold.

A *logical tensor* is a parameter or an optimizer moment with its canonical name and unpadded shape. A *box* is an
axis-aligned block of a logical tensor. Every supported layout is a set of boxes: a replica is one box, a
tensor-parallel slice of a fused projection is three boxes, and a contiguous range of a flattened tensor (ZeRO) is at
most 2*ndim-1 boxes. Writers write the boxes that they hold, and readers ask for the boxes that they need; the
layouts of writers and readers are independent of each other.
"""

import math
import secrets
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

CALLBACK = "callback:"  # prefix of `Shard.kind` for tensors of callbacks
RUNNER = "runner:"  # prefix of `Shard.kind` for tensors of runners; `runner:3:` for tensors of team 3 only


def own_kind(team: int, kind: str) -> str:
    """Return the kind of a tensor with separate values in every team."""
    return f"{RUNNER}{team}:{kind}"


def team_of(kind: str) -> int:
    """Return the team that was passed to `own_kind` to make `kind`; -1 for other kinds."""
    team = kind.removeprefix(RUNNER).partition(":")[0]
    return int(team) if kind.startswith(RUNNER) and team.isdecimal() else -1


def shared_kind(kind: str) -> str:
    """Return the kind that was passed to `own_kind` to make `kind`; other kinds are returned unchanged."""
    return kind if team_of(kind) < 0 else kind.removeprefix(RUNNER).partition(":")[2]


@dataclass(frozen=True, slots=True)
class Box:
    """An axis-aligned block of a logical tensor: `offset[d] <= index[d] < offset[d] + shape[d]`."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @staticmethod
    def whole(shape: tuple[int, ...]) -> "Box":
        return Box((0,) * len(shape), tuple(shape))

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def within(self, shape: tuple[int, ...]) -> bool:
        """Return True if the box lies inside a tensor of this shape."""
        return len(shape) == len(self.shape) == len(self.offset) and all(
            o >= 0 and n >= 0 and o + n <= s for o, n, s in zip(self.offset, self.shape, shape, strict=True)
        )

    def intersect(self, other: "Box") -> "Box | None":
        """Return the intersection of two boxes, or None if it is empty."""
        low = tuple(map(max, self.offset, other.offset))
        high = tuple(
            min(a + m, b + n) for a, m, b, n in zip(self.offset, self.shape, other.offset, other.shape, strict=True)
        )
        if any(h <= lo for lo, h in zip(low, high, strict=True)):
            return None
        return Box(low, tuple(h - lo for lo, h in zip(low, high, strict=True)))

    def slices_in(self, outer: "Box") -> tuple[slice, ...]:
        """Return the slices that select this box from the data of `outer`."""
        return tuple(
            slice(o - base, o - base + n) for o, n, base in zip(self.offset, self.shape, outer.offset, strict=True)
        )


@dataclass
class Piece:
    """A box and its data: `data.shape == box.shape`. Writing to `data` changes the model."""

    box: Box
    data: Tensor

    def part(self, box: Box) -> Tensor:
        """Return the data of a box inside this piece's box."""
        return self.data if box == self.box else self.data[box.slices_in(self.box)]


@dataclass
class Shard:
    """The part of one logical tensor that this rank holds.

    `kind` is "param" for a parameter, the state's name for optimizer state ("exp_avg", "step", ...), or a name
    chosen by a callback or a runner, after the prefix CALLBACK or RUNNER.
    """

    kind: str
    name: str
    shape: tuple[int, ...]
    pieces: list[Piece]


def whole_pieces(tensor: Tensor, shape: tuple[int, ...]) -> list[Piece]:
    """Return a whole tensor as a single piece, without padding beyond the logical `shape`."""
    return without_padding([Piece(Box.whole(tuple(tensor.shape)), tensor.detach())], shape)


def flat_range_pieces(
    flat: Tensor, shape: tuple[int, ...], start: int, padded: tuple[int, ...] | None = None
) -> list[Piece]:
    """Return `flat`, the elements [start, start + flat.numel()) of the flattened logical tensor, as pieces.

    padded: shape of the tensor that was flattened, if it is larger than the logical shape.
    """
    pieces = [
        Piece(box, flat.detach()[first - start : first - start + box.numel].view(box.shape))
        for box, first in _range_boxes(tuple(padded or shape), start, start + flat.numel())
    ]
    return without_padding(pieces, shape)


def dtensor_pieces(tensor: DTensor, shape: tuple[int, ...]) -> list[Piece]:
    """Return this rank's local part of a DTensor as a list of one piece; an empty list if it is only padding."""
    local_shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return without_padding([Piece(Box(tuple(offset), tuple(local_shape)), tensor.to_local().detach())], shape)


def without_padding(pieces: list[Piece], shape: tuple[int, ...]) -> list[Piece]:
    """Cut off padding beyond the logical `shape`."""
    logical = Box.whole(tuple(shape))
    if logical.numel == 0:  # every rank holds all of an empty tensor
        return [Piece(logical, torch.empty(logical.shape))]
    return [Piece(box, piece.part(box)) for piece in pieces if (box := piece.box.intersect(logical)) is not None]


def _range_boxes(shape: tuple[int, ...], start: int, stop: int) -> Iterator[tuple[Box, int]]:
    """Yield boxes that tile the row-major range [start, stop) of a tensor, each with the start of its range."""
    if not shape and start < stop:
        yield Box((), ()), 0
        return
    row = math.prod(shape[1:])  # elements per index of the first dimension
    while start < stop:
        index, first = divmod(start, row)
        if count := 0 if first else (stop - start) // row:  # the range begins with whole rows
            yield Box((index, *[0] * len(shape[1:])), (count, *shape[1:])), start
            start += count * row
        else:
            last = min(row, first + stop - start)
            for box, at in _range_boxes(shape[1:], first, last):
                yield Box((index, *box.offset), (1, *box.shape)), index * row + at
            start += last - first


def check_cover(boxes: list[Box], shape: tuple[int, ...]) -> str | None:
    """Return None if the boxes tile a tensor of this shape exactly once; otherwise, text for an error."""
    if box := next((box for box in boxes if not box.within(shape)), None):
        return f"a box at {list(box.offset)} of shape {list(box.shape)} is outside the shape {list(shape)}"
    covered, wanted = sum(box.numel for box in boxes), math.prod(shape)
    if covered < wanted:
        return f"{wanted - covered} of its {wanted} elements are not in any file"
    # Comparing every pair would take hours for a manifest with a million boxes. Instead, every index along a dimension
    # gets a random weight; `sums` contains the running sums of these weights. The weight of a side is the sum over its
    # indices, and the weight of a box is the product over its sides. Boxes that tile the tensor have the same total
    # weight as the tensor. For any other set of boxes, the weights differ, except with a probability of (number of
    # dimensions) / 2^64 (Schwartz & Zippel).
    sums: list[dict[int, int]] = [defaultdict(partial(secrets.randbits, 64)) for _ in shape]

    def weight(box: Box) -> int:
        sides = zip(sums, box.offset, box.shape, strict=True)
        return math.prod(up_to[first + n] - up_to[first] for up_to, first, n in sides)

    return None if sum(map(weight, boxes)) == weight(Box.whole(shape)) else "its boxes overlap"
