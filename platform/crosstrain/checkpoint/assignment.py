"""Assign boxes to ranks and files: each box is written once, and the work is spread evenly."""

from typing import NamedTuple

from torch import Tensor

from crosstrain.checkpoint.boxes import Box, Shard
from crosstrain.checkpoint.manifest import DTYPES, box_key
from crosstrain.utils.errors import CheckpointError


class Holding(NamedTuple):
    """A box that a rank holds, with the shape and dtype of its logical tensor."""

    kind: str
    name: str
    shape: tuple[int, ...]
    dtype: str
    box: Box

    @property
    def key(self) -> str:
        """The name of the box in its file."""
        return box_key(self.kind, self.name, self.shape, self.box)


def holdings(shards: list[Shard]) -> dict[Holding, Tensor]:
    """Return this rank's boxes and their data. Raises CheckpointError for a dtype that files cannot store."""
    held = {}
    for shard in shards:
        for piece in shard.pieces:
            if piece.data.dtype not in DTYPES:
                raise CheckpointError(f"{shard.kind} {shard.name} is {piece.data.dtype}, which checkpoints cannot hold")
            held[Holding(shard.kind, shard.name, tuple(shard.shape), DTYPES[piece.data.dtype], piece.box)] = piece.data
    return held


def assign(by_rank: list[list[Holding]]) -> dict[Holding, int]:
    """Choose a writer for each distinct box: the holder with the least to write so far. Large boxes come first.

    The choice is deterministic, so every rank computes the same result from the same holdings. Raises CheckpointError
    if ranks disagree about a tensor's shape or dtype.
    """
    holders: dict[Holding, list[int]] = {}
    facts: dict[tuple[str, str], tuple[tuple[int, ...], str]] = {}
    for rank, held in enumerate(by_rank):
        for holding in held:
            kind, name, shape, dtype, _ = holding
            if facts.setdefault((kind, name), (shape, dtype)) != (shape, dtype):
                raise CheckpointError(f"ranks disagree about the shape or type of {kind} {name}")
            holders.setdefault(holding, []).append(rank)
    load = [0] * len(by_rank)
    writers = {}
    for holding in sorted(holders, key=lambda h: (-h.box.numel, h.kind, h.name, h.box.offset)):
        writers[holding] = rank = min(holders[holding], key=lambda r: (load[r], r))
        load[rank] += holding.box.numel
    return writers


def file_names(writers: dict[Holding, int], complete: bool) -> dict[Holding, str]:
    """Return the file of every box, in manifest order.

    Each writer has one file for its boxes. If no parameter is sharded, the parameters go to separate files with Hugging
    Face's names. Pass complete=False if the model has parameters that are not in `writers`.
    """
    # If some parameters are sharded or absent, do not write the others as a partial Hugging Face folder.
    whole = complete and all(h.box.shape == h.shape for h in writers if h.kind == "param")
    ranks = sorted({rank for h, rank in writers.items() if h.kind == "param"})
    model = {rank: f"model-{i:05d}-of-{len(ranks):05d}.safetensors" for i, rank in enumerate(ranks, 1)}
    if len(ranks) == 1:
        model[ranks[0]] = "model.safetensors"
    return {
        h: model[writers[h]] if whole and h.kind == "param" else f"training-{writers[h]:05d}.safetensors"
        for h in sorted(writers, key=lambda h: (h.kind, h.name, h.box.offset))
    }
