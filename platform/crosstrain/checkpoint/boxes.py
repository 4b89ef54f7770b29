"""Boxes: descriptions of the parts of tensors that ranks hold.

A *logical tensor* is a parameter or an optimizer moment under its canonical name and unpadded shape. A *box* is an
axis-aligned block of it. Every layout in use is a set of boxes: a replica is one, a tensor-parallel slice of a fused
projection is three, a contiguous range of a flattened tensor (ZeRO) is at most 2*ndim-1. A writer writes the boxes it
holds, a reader asks for the boxes it needs, and neither knows the other's layout.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

CALLBACK = "callback:"  # begins the kinds of tensors that callbacks keep
RUNNER = "runner:"  # begins the kinds that a runner keeps for itself; `runner:3:` those of rank 3 only


def own_kind(rank: int, kind: str) -> str:
    """The kind of a tensor that every rank has an own copy of."""
    return f"{RUNNER}{rank}:{kind}"


def shared_kind(kind: str) -> str:
    """The kind of a tensor without the number of the rank whose own copy it is, if it is one."""
    prefix, _, name = kind.removeprefix(RUNNER).partition(":")
    return name if kind.startswith(RUNNER) and prefix.isdecimal() else kind


@dataclass(frozen=True, slots=True)
class Box:
    """An axis-aligned block of a logical tensor: `offset[d] <= index[d] < offset[d] + shape[d]`."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.offset) != len(self.shape):
            raise ValueError(f"a box at {list(self.offset)} of shape {list(self.shape)}")

    @staticmethod
    def whole(shape: tuple[int, ...]) -> Box:
        return Box((0,) * len(shape), tuple(shape))

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def within(self, shape: tuple[int, ...]) -> bool:
        """Return True where the box lies inside a tensor of this shape."""
        return len(shape) == len(self.shape) and all(
            o >= 0 and n >= 0 and o + n <= s for o, n, s in zip(self.offset, self.shape, shape, strict=True)
        )

    def intersect(self, other: Box) -> Box | None:
        """Return the common block, or None where it is empty."""
        if self == other and self.numel:
            return self
        low = tuple(map(max, self.offset, other.offset))
        high = tuple(
            min(a + m, b + n) for a, m, b, n in zip(self.offset, self.shape, other.offset, other.shape, strict=True)
        )
        if any(h <= lo for lo, h in zip(low, high, strict=True)):
            return None
        return Box(low, tuple(h - lo for lo, h in zip(low, high, strict=True)))

    def slices_in(self, outer: Box) -> tuple[slice, ...]:
        """Index of this box inside the tensor that holds `outer`."""
        return tuple(
            slice(o - base, o - base + n) for o, n, base in zip(self.offset, self.shape, outer.offset, strict=True)
        )


@dataclass
class Piece:
    """A box and the memory that holds it: `data.shape == box.shape`; writing to `data` changes the model."""

    box: Box
    data: Tensor

    def part(self, box: Box) -> Tensor:
        """Return the memory of a box inside this one."""
        return self.data if box == self.box else self.data[box.slices_in(self.box)]


@dataclass
class Shard:
    """The part of one logical tensor that this rank holds.

    `kind` is "param" for a parameter, the optimizer's name for its state ("exp_avg", "step", ...), or CALLBACK or
    RUNNER and the name that a callback or a runner gives its tensor.
    """

    kind: str
    name: str
    shape: tuple[int, ...]
    pieces: list[Piece]


def whole_pieces(tensor: Tensor, shape: tuple[int, ...]) -> list[Piece]:
    """Return the one piece of a rank that holds all of a tensor; padding beyond the logical `shape` is cut off."""
    return without_padding([Piece(Box.whole(tuple(tensor.shape)), tensor.detach())], shape)


def flat_range_pieces(
    flat: Tensor, shape: tuple[int, ...], start: int, padded: tuple[int, ...] | None = None
) -> list[Piece]:
    """Return the pieces of a rank that holds elements [start, start + flat.numel()) of the flattened logical tensor.

    `padded` is the shape that was flattened, if it is larger than the logical one.
    """
    pieces = [
        Piece(box, flat.detach()[first - start : first - start + box.numel].view(box.shape))
        for box, first in _range_boxes(tuple(padded or shape), start, start + flat.numel())
    ]
    return without_padding(pieces, shape)


def dtensor_pieces(tensor: DTensor, shape: tuple[int, ...]) -> list[Piece]:
    """Return the piece of a rank that holds the local part of a DTensor."""
    local_shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    local = tensor.to_local().detach()
    return without_padding([Piece(Box(tuple(offset), tuple(local_shape)), local)], shape)


def without_padding(pieces: list[Piece], shape: tuple[int, ...]) -> list[Piece]:
    """Cut off padding beyond the logical `shape`."""
    logical = Box.whole(tuple(shape))
    if logical.numel == 0:  # every rank holds all of nothing
        return [Piece(logical, torch.empty(logical.shape))]
    cut = [(piece, piece.box.intersect(logical)) for piece in pieces]
    return [Piece(box, piece.part(box)) for piece, box in cut if box is not None]


def _range_boxes(shape: tuple[int, ...], start: int, stop: int) -> Iterator[tuple[Box, int]]:
    """Yield boxes that tile the row-major range [start, stop) of a tensor, each with its first flat index."""
    if not shape and start < stop:
        yield Box((), ()), 0
        return
    row = math.prod(shape[1:])  # elements per index of the first dimension
    while start < stop:
        index, first = divmod(start, row)
        if count := 0 if first else (stop - start) // row:  # whole rows
            yield Box((index, *[0] * len(shape[1:])), (count, *shape[1:])), start
            start += count * row
        else:
            last = min(row, first + stop - start)
            for box, at in _range_boxes(shape[1:], first, last):
                yield Box((index, *box.offset), (1, *box.shape)), index * row + at
            start += last - first


def check_cover(boxes: list[Box], shape: tuple[int, ...]) -> str | None:
    """Return None if the boxes tile a tensor of this shape exactly once; otherwise the mistake, as a clause."""
    for box in boxes:
        if not box.within(shape):
            return f"a box at {list(box.offset)} of shape {list(box.shape)} lies outside {list(shape)}"
    covered, wanted = sum(box.numel for box in boxes), math.prod(shape)
    if covered < wanted:
        return f"{wanted - covered} of its {wanted} elements are in no file"
    if len(boxes) == 1:
        return None
    # Comparing every pair would take hours where somebody wrote a million boxes. Instead every index along a dimension
    # gets a random weight, kept as running sums, and a box weighs the product of its sides: boxes that tile the tensor
    # weigh as much as it does, and any others differ but for a chance of dimensions / 2^64 (Schwartz & Zippel).
    draw = random.SystemRandom().getrandbits
    sums: list[dict[int, int]] = [defaultdict(lambda: draw(64)) for _ in shape]

    def weight(box: Box) -> int:
        sides = zip(sums, box.offset, box.shape, strict=True)
        return math.prod(up_to[first + n] - up_to[first] for up_to, first, n in sides)

    if sum(map(weight, boxes)) != weight(Box.whole(shape)):
        return "its boxes overlap"
    return None
