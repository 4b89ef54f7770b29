"""Assignment of boxes to the ranks that write them: each box once, the work spread evenly."""

from __future__ import annotations

from dataclasses import dataclass

from crosstrain.checkpoint.boxes import Box, Shard
from crosstrain.checkpoint.manifest import DTYPES, box_key
from crosstrain.utils.errors import CheckpointError

Holding = tuple[str, str, tuple[int, ...], str, Box]  # kind, name, logical shape, dtype, box


@dataclass(frozen=True)
class Assignment:
    """One box and the rank that writes it."""

    kind: str
    name: str
    shape: tuple[int, ...]
    dtype: str
    box: Box
    rank: int

    @property
    def key(self) -> str:
        """Name of the tensor in its file."""
        return box_key(self.kind, self.name, self.shape, self.box)


def holdings(shards: list[Shard]) -> list[Holding]:
    """Describe this rank's shards to the other ranks. Raises CheckpointError for a type that files cannot hold."""
    held = []
    for shard in shards:
        for piece in shard.pieces:
            if piece.data.dtype not in DTYPES:
                raise CheckpointError(f"{shard.kind} {shard.name} is {piece.data.dtype}, which checkpoints cannot hold")
            held.append((shard.kind, shard.name, tuple(shard.shape), DTYPES[piece.data.dtype], piece.box))
    return held


def assign(by_rank: list[list[Holding]]) -> list[Assignment]:
    """Choose a writer for each distinct box, the largest first: the holder with the least to write so far.

    Deterministic, so that every rank computes the same from the same holdings. Raises CheckpointError where ranks
    disagree about a tensor's shape or type.
    """
    holders: dict[tuple[str, str, Box], list[int]] = {}
    facts: dict[tuple[str, str], tuple[tuple[int, ...], str]] = {}
    for rank, held in enumerate(by_rank):
        for kind, name, shape, dtype, box in held:
            if facts.setdefault((kind, name), (shape, dtype)) != (shape, dtype):
                raise CheckpointError(f"ranks disagree about the shape or type of {kind} {name}")
            holders.setdefault((kind, name, box), []).append(rank)
    load = [0] * len(by_rank)
    out = []
    for kind, name, box in sorted(holders, key=lambda h: (-h[2].numel, h[0], h[1], h[2].offset)):
        ranks = holders[kind, name, box]
        rank = min(ranks, key=lambda r: (load[r], r))
        load[rank] += box.numel
        out.append(Assignment(kind, name, *facts[kind, name], box, rank))
    return out
