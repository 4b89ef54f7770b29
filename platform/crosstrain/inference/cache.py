"""Key/value caches for decoding."""

from typing import Any

from torch import Tensor
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer

BLOCK = 64  # tokens per block; a multiple of the SIMD width


class GrowingLayer(DynamicLayer):
    """Keys and values in buffers with room for a block of tokens; `DynamicLayer` copies all of them for each token."""

    keys: Any
    values: Any

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Append keys and values [rows, heads, tokens, width]; return those of all tokens."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self._rooms = [key_states[:, :, :0], value_states[:, :, :0]]
        start = self.get_seq_length()
        stop = start + key_states.shape[2]
        for number, (held, new) in enumerate(((self.keys, key_states), (self.values, value_states))):
            if self._rooms[number].shape[2] < stop:
                room = new.new_empty(*new.shape[:2], start + max(BLOCK, stop - start), new.shape[3])
                if start:
                    room[:, :, :start] = held
                self._rooms[number] = room
            self._rooms[number][:, :, start:stop] = new
        self.keys, self.values = (room[:, :, :stop] for room in self._rooms)
        return self.keys, self.values

    def reorder_cache(self, beam_idx: Tensor) -> None:
        super().reorder_cache(beam_idx)
        self._rooms = [self.keys, self.values]


class GrowingCache(DynamicCache):
    """A `DynamicCache` whose ordinary layers are `GrowingLayer`."""

    layers: Any

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config=config)
        self.layers = [GrowingLayer() if type(layer) is DynamicLayer else layer for layer in self.layers]


class ShiftedCache(GrowingCache):
    """A key/value cache of a model whose positions are not numbers of tokens.

    shift: [rows, 1], a row's next position minus its number of tokens; the forward of the prompt sets it.
    """

    shift: Tensor | int = 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        super().reorder_cache(beam_idx)
        if isinstance(self.shift, Tensor):
            self.shift = self.shift[beam_idx]
