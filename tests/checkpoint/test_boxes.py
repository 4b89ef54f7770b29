"""Boxes: any layout is written and read as blocks of the logical tensor."""

from __future__ import annotations

import itertools
import math
import time

import torch
from hypothesis import given
from hypothesis import strategies as st

from crosstrain.checkpoint.boxes import Box, check_cover, flat_range_pieces, whole_pieces
from crosstrain.checkpoint.checkpointer import Holding, assign

shapes = st.lists(st.integers(1, 5), min_size=0, max_size=4).map(tuple)


def numbered(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(math.prod(shape), dtype=torch.float32).view(shape)


@given(shapes, st.data())
def test_flat_ranges_are_few_boxes_that_hold_the_right_elements(shape: tuple[int, ...], data: st.DataObject) -> None:
    size = math.prod(shape)
    cuts = sorted(data.draw(st.lists(st.integers(0, size), max_size=4)))
    tensor, boxes = numbered(shape), []
    for start, stop in zip([0, *cuts], [*cuts, size], strict=True):
        pieces = flat_range_pieces(tensor.reshape(-1)[start:stop], shape, start)
        assert len(pieces) <= max(2 * len(shape) - 1, 1)
        for piece in pieces:
            assert torch.equal(piece.data, tensor[piece.box.slices_in(Box.whole(shape))])
        boxes += [piece.box for piece in pieces]
    assert check_cover(boxes, shape) is None


@given(shapes.filter(bool), st.data())
def test_cover_finds_a_hole_an_overlap_and_an_outsider(shape: tuple[int, ...], data: st.DataObject) -> None:
    size = math.prod(shape)
    cut = data.draw(st.integers(0, size))
    flat = numbered(shape).reshape(-1)
    left = [p.box for p in flat_range_pieces(flat[:cut], shape, 0)]
    right = [p.box for p in flat_range_pieces(flat[cut:], shape, cut)]
    boxes = left + right
    assert check_cover(boxes, shape) is None
    victim = data.draw(st.sampled_from(boxes))
    assert "not in any file" in (check_cover([b for b in boxes if b is not victim], shape) or "")
    assert "overlap" in (check_cover([*boxes, victim], shape) or "")
    outside = Box(tuple(shape), (1,) * len(shape))
    assert "outside" in (check_cover([*boxes, outside], shape) or "")


@given(shapes, st.data())
def test_boxes_cover_a_tensor_if_each_element_is_in_just_one(shape: tuple[int, ...], data: st.DataObject) -> None:
    counts, boxes = torch.zeros(shape), []
    cuts = sorted({0, math.prod(shape), data.draw(st.integers(0, math.prod(shape)))})
    for start, stop in itertools.pairwise(cuts):
        boxes += [p.box for p in flat_range_pieces(torch.zeros(stop - start), shape, start)]
    for _ in range(data.draw(st.integers(0, 2))):  # one goes, and one comes that may be as large
        boxes.pop(data.draw(st.integers(0, len(boxes) - 1)))
        offset = tuple(data.draw(st.integers(0, n - 1)) for n in shape)
        sides = zip(offset, shape, strict=True)
        boxes.append(Box(offset, tuple(data.draw(st.integers(0, n - first)) for first, n in sides)))
    for box in boxes:
        counts[box.slices_in(Box.whole(shape))] += 1
    assert (check_cover(boxes, shape) is None) == bool(counts.eq(1).all())


def test_many_boxes_are_compared_in_seconds() -> None:
    start = time.monotonic()
    boxes = [Box((0, i), (1, 1)) for i in range(50_000)]
    assert check_cover(boxes, (1, len(boxes))) is None
    boxes[-1] = boxes[0]
    assert check_cover(boxes, (1, len(boxes))) is not None
    assert time.monotonic() - start < 20  # every pair would take hours


@given(shapes, st.data())
def test_intersections_are_what_both_hold(shape: tuple[int, ...], data: st.DataObject) -> None:
    def box() -> Box:
        offset = tuple(data.draw(st.integers(0, n - 1)) for n in shape)
        return Box(offset, tuple(data.draw(st.integers(1, n - o)) for n, o in zip(shape, offset, strict=True)))

    def mask(b: Box) -> torch.Tensor:
        out = torch.zeros(shape, dtype=torch.bool)
        out[b.slices_in(Box.whole(shape))] = True
        return out

    a, b = box(), box()
    common = a.intersect(b)
    expected = mask(a) & mask(b)
    assert torch.equal(mask(common), expected) if common else not expected.any()


def test_padding_is_cut_off_and_writing_reaches_the_tensor() -> None:
    padded = torch.zeros(8, 3)
    (piece,) = whole_pieces(padded, (5, 3))
    piece.data.fill_(1.0)
    assert padded[:5].eq(1).all()
    assert padded[5:].eq(0).all()


@given(st.integers(1, 4), st.lists(st.integers(1, 50), min_size=1, max_size=12))
def test_replicas_are_written_once_and_work_is_spread(ranks: int, sizes: list[int]) -> None:
    held = [Holding("param", f"p{i}", (n,), "F32", Box.whole((n,))) for i, n in enumerate(sizes)]
    writers = assign([held] * ranks)
    assert set(writers) == set(held)
    load = [sum(h.box.numel for h, rank in writers.items() if rank == r) for r in range(ranks)]
    # Largest first to the least loaded: no rank is ahead of another by more than one tensor.
    assert max(load) - min(load) <= max(sizes)
