"""A key/value cache whose rows grow independently, so that sequences of any age are computed together.

No row sees another, so a row's logits are the same beside any neighbours, up to rounding. Rounding is kept small by
fixed shapes: a forward is always of all rows, in use or not, over a whole number of blocks of keys, and a masked key
adds an exact zero. Equality to the bit is not promised: threads split a product, so the order of a row's sums may
depend on the row's number, and the longest row decides how many blocks all rows read.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache
from transformers.cache_utils import DynamicLayer

BLOCK = 64  # keys; a multiple of what vector instructions take at once


class Lanes(Cache):
    """Keys and values of `rows` sequences, each of its own length. `batch` is what one forward computes."""

    def __init__(self, rows: int) -> None:
        super().__init__(layers=[])
        self.lengths = [0] * rows
        self._held: dict[int, tuple[Tensor, Tensor]] = {}  # layer: keys, values, each [rows, heads, room, width]

    @staticmethod
    def can_hold(cache: Any) -> bool:
        """Whether a cache of one sequence is of the kind that is kept here: every layer sees all that came before."""
        return isinstance(cache, DynamicCache) and all(type(layer) is DynamicLayer for layer in cache.layers)

    def take(self, row: int, cache: DynamicCache) -> None:
        """Begin a row as the one sequence that `cache` holds."""
        # A stage of a pipeline has some of the layers.
        length = max(layer.get_seq_length() for layer in cache.layers if isinstance(layer, DynamicLayer))
        for number, layer in enumerate(cache.layers):
            assert isinstance(layer, DynamicLayer)
            if layer.keys is None or layer.values is None:  # of another stage of a pipeline
                continue
            for held, new in zip(self._room(number, layer.keys, length), (layer.keys, layer.values), strict=True):
                held[row, :, :length] = new[0]
        self.lengths[row] = length

    def free(self, row: int) -> None:
        self.lengths[row] = 0

    # ---- a forward

    def batch(self, tokens: dict[int, int]) -> dict[str, Any]:
        """The batch that adds a token to some rows; the others compute something that nobody looks at."""
        rows = len(self.lengths)
        new = torch.zeros(rows, 1, dtype=torch.long)
        for row, token in tokens.items():
            new[row] = token
        self._at = torch.tensor(self.lengths)
        self._span = -(-(max(self.lengths) + 1) // BLOCK) * BLOCK
        seen = torch.arange(self._span) <= self._at[:, None]
        return {
            "input_ids": new, "position_ids": self._at[:, None], "attention_mask": seen[:, None, None], "cache": self,
        }  # fmt: skip

    def done(self, tokens: dict[int, int]) -> None:
        """The forward of that batch is over."""
        for row in tokens:
            self.lengths[row] += 1

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any) -> Any:
        """A layer's keys and values [rows, heads, span, width], with the new ones [rows, heads, 1, width] in place."""
        rows = torch.arange(len(self.lengths), device=key_states.device)
        at = self._at.to(key_states.device)
        out = []
        for held, new in zip(self._room(layer_idx, key_states, self._span), (key_states, value_states), strict=True):
            held[rows, :, at] = new[:, :, 0].to(held.dtype)
            out.append(held[:, :, : self._span])
        return tuple(out)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return max(self.lengths)

    def _room(self, layer: int, like: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """A layer's memory, with room for sequences of this length; what is not in use is zero or once was finite.

        Values are kept in the keys' precision, as `DynamicCache` does: under autocast keys may be fp32, values bf16.
        """
        held = self._held.get(layer)
        if held is not None and held[0].shape[2] >= length:
            return held
        room = max(-(-length // BLOCK) * BLOCK, 2 * held[0].shape[2] if held else 0)
        keys, values = (like.new_zeros(len(self.lengths), like.shape[1], room, like.shape[3]) for _ in range(2))
        for new, old in zip((keys, values), held or (), strict=False):
            new[:, :, : old.shape[2]] = old
        self._held[layer] = keys, values
        return keys, values
