"""Batched decoding under any runner: next-token logits for sequences that grow one token at a time.

`DecodeState` decodes sequences that start and end together, as in generation and VQA. `Decoder` has slots in which
sequences start and end independently, as in a server.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import Cache

from crosstrain.data.join import join_padded
from crosstrain.engine.runner import Runner
from crosstrain.inference.cache import BLOCK, GrowingCache, GrowingLayer, ShiftedCache
from crosstrain.utils.types import Sample


class DecodeState:
    """Prompts decoded together, with a key/value cache if the model supports a cache.

    Prompts of different lengths are padded on the left; the model must then accept position IDs. Equal prompts without
    other fields are computed once, for all their rows.
    """

    def __init__(self, runner: Runner, prompts: Sequence[Sample]) -> None:
        self._runner, self.cache = runner, runner.model.new_cache()
        self._copies: Tensor | None = None  # until the first logits: the computed prompt of each row
        if self.cache is not None and all(prompt.keys() == {"input_ids"} for prompt in prompts):
            numbers: dict[bytes, int] = {}
            rows = [numbers.setdefault(prompt["input_ids"].tobytes(), len(numbers)) for prompt in prompts]
            if len(numbers) < len(prompts):
                self._copies, prompts = torch.tensor(rows), [prompts[rows.index(i)] for i in range(len(numbers))]
        ids = [torch.from_numpy(prompt["input_ids"]) for prompt in prompts]
        self._ids = _padded(ids)
        self._mask = _padded([torch.ones_like(row) for row in ids])
        self._extra = {}
        for key in {key for prompt in prompts for key in prompt} - {"input_ids"}:
            found = [torch.from_numpy(prompt[key]) for prompt in prompts if key in prompt]
            of_tokens = [value.shape for value in found] == [row.shape for row in ids]
            self._extra[key] = _padded(found) if of_tokens else join_padded(found)

    def logits(self) -> Tensor:
        """Compute fp32 logits [prompts, vocabulary] of the next token. Collective. Call once before each `append`."""
        batch = {"input_ids": self._ids, "cache": self.cache, **self._extra}
        positions = (self._mask.cumsum(1) - 1).clamp(min=0)[:, -self._ids.shape[1] :]
        if not self._mask.all():
            batch |= {"attention_mask": self._mask, "position_ids": positions}
        if isinstance(self.cache, ShiftedCache):
            batch["position_ids"] = positions + (self.cache.shift if self.cache.get_seq_length() else 0)
        logits = self._runner.evaluate(batch).float()
        if self._copies is not None:
            self.cache.reorder_cache(self._copies)
            self._mask, logits, self._copies = self._mask[self._copies], logits[self._copies], None
        return logits

    def append(self, tokens: Tensor) -> None:
        """Append one token to each sequence; tokens: [prompts]."""
        self._mask = pad(self._mask, (0, 1), value=1)
        if self.cache is None:
            self._ids = torch.cat([self._ids, tokens[:, None]], 1)
        else:
            self._ids, self._extra = tokens[:, None], {}


def _padded(rows: list[Tensor]) -> Tensor:
    """Stack values of tokens; shorter rows get zeros on the left."""
    longest = max(map(len, rows))
    return torch.stack([pad(row, (longest - len(row), 0)) for row in rows])


class Decoder:
    """Slots that each decode one sequence; all ranks of a runner have the same slots.

    A slot's logits do not depend on the other slots, up to rounding. All slots are decoded in one batch if `KVSlots`
    can hold the model's cache, otherwise one by one.
    """

    def __init__(self, runner: Runner, slots: int) -> None:
        self._runner = runner
        cache = runner.model.new_cache()  # `KVSlots` needs the keys and values of all earlier tokens
        known = isinstance(cache, GrowingCache) and all(type(layer) is GrowingLayer for layer in cache.layers)
        self._kv = KVSlots(slots) if runner.model.takes_positions and known else None
        self._states: dict[int, DecodeState] = {}

    def start(self, slots: list[int], prompt: Sample) -> Tensor:
        """Start a prompt in these slots, and return the next token's logits [vocabulary] on the CPU. Collective."""
        states = [DecodeState(self._runner, [prompt]) for _ in (slots if self._kv is None else slots[:1])]
        logits = [state.logits()[0].cpu() for state in states]
        if self._kv is None:
            self._states |= zip(slots, states, strict=True)
        else:
            for slot in slots:
                self._kv.take(slot, states[0].cache)
        return logits[0]

    def step(self, tokens: dict[int, int]) -> dict[int, Tensor]:
        """Append a token to each slot in `tokens`, and return slot -> logits [vocabulary] on the CPU. Collective."""
        if self._kv is not None:
            logits = self._runner.evaluate(self._kv.batch(tokens)).float().cpu()
            for slot in tokens:
                self._kv.lengths[slot] += 1
            return {slot: logits[slot] for slot in tokens}
        for slot, token in tokens.items():
            self._states[slot].append(torch.tensor([token]))
        return {slot: self._states[slot].logits()[0].cpu() for slot in tokens}

    def free(self, slot: int) -> None:
        if self._kv is not None:
            self._kv.lengths[slot] = 0
        self._states.pop(slot, None)


class KVSlots(Cache):
    """A key/value cache with one sequence of any length per slot; a forward computes the slots up to the last used.

    A slot does not attend to other slots, so other slots affect its logits only through rounding. Results are not
    bitwise reproducible: the order of additions in a matmul depends on the number of slots that are computed, and,
    because threads split a matmul, on the slot's index. A forward reads a whole number of blocks of keys, which the
    longest sequence sets; a masked key adds an exact zero.
    """

    def __init__(self, slots: int) -> None:
        super().__init__(layers=[])
        self.lengths = [0] * slots
        self.shifts = [0] * slots  # see `ShiftedCache`
        self._held: dict[int, tuple[Tensor, Tensor]] = {}  # layer -> keys and values, each [slots, heads, room, width]

    def take(self, slot: int, cache: GrowingCache) -> None:
        """Copy the single sequence in `cache` to a slot."""
        # A pipeline stage fills only its own layers.
        filled = {number: layer for number, layer in enumerate(cache.layers) if layer.keys is not None}
        self.shifts[slot] = int(cache.shift) if isinstance(cache, ShiftedCache) else 0
        self.lengths[slot] = length = max((layer.get_seq_length() for layer in filled.values()), default=0)
        for number, layer in filled.items():
            for held, new in zip(self._room(number, layer.keys, length), (layer.keys, layer.values), strict=True):
                held[slot, :, :length] = new[0]

    def batch(self, tokens: dict[int, int]) -> dict[str, Any]:
        """Build the batch that appends a token to each slot in `tokens`; logits of the other slots are unused."""
        new = torch.zeros(max(tokens) + 1, 1, dtype=torch.long)
        new[[*tokens], 0] = torch.tensor([*tokens.values()])
        self._at = torch.tensor(self.lengths[: len(new)])
        self._span = -(-(max(self.lengths) + 1) // BLOCK) * BLOCK
        seen = torch.arange(self._span) <= self._at[:, None]
        return {
            "input_ids": new,
            "position_ids": self._at[:, None] + torch.tensor(self.shifts[: len(new)])[:, None],
            "attention_mask": seen[:, None, None],
            "cache": self,
        }

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any) -> Any:
        """Store new keys and values [rows, heads, 1, width] of a layer; return all [rows, heads, span, width]."""
        at = self._at.to(key_states.device)[:, None, None, None]
        found = tuple(held[: len(at), :, : self._span] for held in self._room(layer_idx, key_states, self._span))
        for held, new in zip(found, (key_states, value_states), strict=True):
            held.scatter_(2, at.expand_as(new), new.to(held.dtype))
        return found

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return max(self.lengths)

    def _room(self, layer: int, like: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Return a layer's buffers, after growing them to hold sequences of this length; unused entries are finite.

        Values are stored in the dtype of the keys, as in `DynamicCache`: under autocast, keys may be fp32 and values
        bf16.
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
