"""Initialization of parameters that no checkpoint and no pretrained weights fill."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from crosstrain.checkpoint.boxes import Box, Shard
from crosstrain.modeling.base import Model
from crosstrain.utils.rng import generator


def fill_initial(model: Model, shards: Iterable[Shard], seed: int) -> None:
    """Fill parameter shards with initial values, a function of (seed, canonical name, logical shape) alone.

    One logical tensor exists at a time, so a rank needs no more memory than its share and the largest tensor.
    """
    for shard in shards:
        if shard.kind != "param" or not shard.pieces:
            continue
        value = torch.empty(shard.shape)
        model.initialize(shard.name, value, generator(seed, shard.name, *shard.shape))
        for piece in shard.pieces:
            piece.data.copy_(value[piece.box.slices_in(Box.whole(shard.shape))])
