"""Attention implementations of transformers, and attention within documents that share a sequence.

transformers' attention functions get the documents' boundaries as keyword arguments of the model's forward. Its flash
attention reads `cu_seq_lens_q` and its like; the functions `sdpa` and `eager` do not, so `sdpa` is replaced here by one
that does. Nothing is left to transformers' detection of restarting positions alone, which an attention mask or a cache
switches off without a word.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import is_flash_attn_2_available

from crosstrain.modeling.context import Context
from crosstrain.modeling.meta_init import has_values
from crosstrain.utils.errors import ConfigError

Attention = Literal["sdpa", "eager", "flash_attention_2", "flex_attention"]


def choose_attention(asked: Attention | None, model: type[PreTrainedModel], config: PreTrainedConfig) -> Attention:
    """Return what is asked for; by default `sdpa` where the model has it, else `eager`.

    Raises ConfigError, which says what is missing.
    """
    capped = bool(getattr(config, "attn_logit_softcapping", None))  # which transformers' sdpa refuses
    has: dict[Attention, bool] = {
        "sdpa": model._supports_sdpa and not capped, "eager": True, "flash_attention_2": model._supports_flash_attn,
        "flex_attention": model._supports_flex_attn,
    }  # fmt: skip
    if asked is None:
        return "sdpa" if has["sdpa"] else "eager"
    if not has[asked]:
        there = ", ".join(name for name, has_it in has.items() if has_it)
        raise ConfigError(f"model.attention: {model.__name__} has no {asked}, but {there}")
    if asked == "flash_attention_2" and not is_flash_attn_2_available():
        raise ConfigError("model.attention: flash_attention_2 needs a CUDA GPU and the package flash-attn; use sdpa")
    if asked == "flex_attention" and not torch.cuda.is_available():
        raise ConfigError("model.attention: flex_attention has no backward on CPUs; use sdpa")
    return asked


@dataclass
class Documents:
    """Boundaries of the documents in a batch, and the modules whose attention has kept to them.

    With a `context`, its ranks have parts of the rows, and attention gets them together.
    """

    rows: int
    length: int  # tokens of a row
    starts: list[int]  # of the documents, in the rows one after another; and the number of all tokens
    context: Context | None = None
    seen: set[int] = field(default_factory=set)

    @staticmethod
    def of(position_ids: Tensor, context: Context | None = None) -> Documents | None:
        """Find the documents in position_ids [batch, length], which begin with 0.

        None if each row is a single one, and no context has parts of it. position_ids without values say that, too: a
        plan counts attention as if nothing was packed.
        """
        rows, length = position_ids.shape
        starts = [*range(0, rows * length, length)]
        if has_values(position_ids):
            found = (position_ids.flatten() == 0).nonzero().flatten().tolist()
            assert set(starts) <= set(found), "a row begins with a document"
            starts = found
        return Documents(rows, length, [*starts, rows * length], context) if len(starts) > rows or context else None

    def __iter__(self) -> Iterator[tuple[int, slice]]:
        """The row and the place in it of every document, in order."""
        for start, stop in itertools.pairwise(self.starts):
            row, begin = divmod(start, self.length)
            yield row, slice(begin, begin + stop - start)

    def numbers(self) -> Tensor:
        """The number of the document of each token [batch, length]."""
        numbers = torch.zeros(self.rows * self.length, dtype=torch.long)
        numbers[self.starts[:-1]] = 1
        return numbers.cumsum(0).view(self.rows, self.length)

    def mask(self) -> Tensor:
        """The causal mask within documents, boolean [batch, 1, length, length]."""
        numbers = self.numbers()
        return (numbers[:, :, None] == numbers[:, None]).tril()[:, None]

    def arguments(self, attention: str, uniform: bool, device: torch.device) -> dict[str, Any]:
        """Arguments of a transformers model's forward. `uniform`: every block attends to the whole past."""
        if attention == "sdpa":
            # transformers passes a mask of four dimensions on as it is, instead of making a dense one. Attention that
            # does not know of documents fails over this one, which fits no keys.
            length = self.context.share(self.length) if self.context else self.length
            unread = torch.empty(self.rows, 1, length, 0, dtype=torch.bool, device=device)
            return {"documents": self} | ({"attention_mask": unread} if uniform else {})
        if attention == "eager":
            return {"attention_mask": self.mask().to(device)}
        if attention == "flex_attention":
            numbers = self.numbers().to(device)

            def within(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
                return (query >= key) & (numbers[row, query] == numbers[row, key])

            blocks = create_block_mask(within, self.rows, None, self.length, self.length, device=device.type)
            return {"attention_mask": blocks}
        starts = torch.tensor(self.starts, dtype=torch.int32, device=device)
        longest = max(place.stop - place.start for _, place in self)
        return {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts, "max_length_q": longest, "max_length_k": longest}

    def check_seen(self, blocks: Iterable[nn.Module]) -> None:
        """Raise ConfigError for a block with parameters none of whose modules has kept to the documents."""
        for number, block in enumerate(blocks):
            if next(block.parameters(), None) is not None and not any(id(m) in self.seen for m in block.modules()):
                raise ConfigError(
                    f"model: block {number} ({type(block).__name__}) lets documents of a sequence see each other, and "
                    f"ranks cannot share one; use another model, or train without packing, document_mask and "
                    f"context_parallel"
                )


_sdpa: Callable[..., tuple[Tensor, None]] = sdpa_attention_forward


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    documents: Documents | None = None, position_bias: Tensor | None = None, **kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """transformers' sdpa attention, applied to each document by itself; [batch, length, heads, width].

    With a context, `length` is that of this rank's part, of the tensors that come and of the one that goes.
    """
    if documents is None:
        return _sdpa(module, query, key, value, attention_mask, position_bias=position_bias, **kwargs)
    documents.seen.add(id(module))
    mask = attention_mask if attention_mask is not None and attention_mask.shape[-1] else None
    if (context := documents.context) is not None:
        query, key, value = context.to_heads(query, key, value)

    def within(tensor: Tensor | None, row: int, place: slice, both: bool) -> Tensor | None:
        if tensor is None:
            return None
        own = tensor[row : row + 1] if tensor.shape[0] > 1 else tensor
        return own[..., place, place] if both else own[:, :, place]

    if len(documents.starts) == documents.rows + 1:
        out = _sdpa(module, query, key, value, mask, position_bias=position_bias, **kwargs)[0]
    else:
        outputs = [
            _sdpa(
                module, *(within(tensor, row, place, False) for tensor in (query, key, value)),
                within(mask, row, place, True), position_bias=within(position_bias, row, place, True), **kwargs,
            )[0]
            for row, place in documents
        ]  # fmt: skip
        out = torch.cat(outputs, 1).view(query.shape[0], query.shape[2], *outputs[0].shape[2:])
    return out if context is None else context.to_parts(out), None


ALL_ATTENTION_FUNCTIONS.register("sdpa", _attention)
