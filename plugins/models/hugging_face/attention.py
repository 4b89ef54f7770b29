"""transformers' attention implementations, with document masking for packed sequences.

transformers passes keyword arguments of a model's forward on to the attention functions. Flash attention gets the
document boundaries as `cu_seq_lens_q` and related arguments. `sdpa` takes no boundaries, so it is called once per
document. All attention functions except `eager` are wrapped, and the wrappers are registered under new names. The
wrappers record the modules that respect the boundaries, and do the collectives of context parallelism. transformers can
detect restarting positions itself, but an attention mask or a cache silently disables the detection, so this module
does not use it.
"""

import inspect
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn
from torch._guards import detect_fake_mode
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_flash_attention_utils import lazy_import_flash_attention
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import is_flash_attn_2_available, is_flash_attn_3_available, is_kernels_available

from crosstrain import ConfigError, explained, has_values
from crosstrain.engine.precision import mkl_products
from crosstrain.modeling.context import Context

from . import cpu_attention

Attention = Literal[
    "sdpa", "eager", "flash_attention_2", "flash_attention_3", "kernels-community/flash-attn2",
    "kernels-community/flash-attn3", "kernels-community/vllm-flash-attn3",
]  # fmt: skip


def choose_attention(asked: Attention | None, model: type[PreTrainedModel], config: PreTrainedConfig) -> Attention:
    """Return the requested attention; the default is `sdpa` if the model supports it, else `eager`.

    Raises ConfigError if the model, the machine or the installation does not support the requested attention.
    """
    capped = bool(getattr(config, "attn_logit_softcapping", None))  # transformers' sdpa cannot cap logits
    has = {
        "sdpa": model._supports_sdpa and not capped, "eager": True,
        "flash attention": model._supports_flash_attn,
    }  # fmt: skip
    if asked is None:
        return "sdpa" if has["sdpa"] else "eager"
    flash = is_flash(asked)
    if not has["flash attention" if flash else asked]:
        there = ", ".join(name for name, has_it in has.items() if has_it)
        raise ConfigError(f"model.attention: {model.__name__} does not support {asked}; it supports {there}")
    if flash:
        if missing := _missing(asked):
            raise ConfigError(f"model.attention: {asked} needs a CUDA GPU and the package {missing}; use sdpa")
        # A kernel may not fit the torch version, or a download may fail.
        with explained(f"model.attention: {asked} cannot be loaded; use sdpa"):
            lazy_import_flash_attention(asked)
    return asked


def is_flash(attention: str) -> bool:
    return "flash" in attention


def _missing(flash: str) -> str | None:
    """Return the name of the flash attention package if it or a GPU is missing; None if nothing is missing."""
    package, there = {
        "flash_attention_2": ("flash-attn", is_flash_attn_2_available),
        "flash_attention_3": ("flash-attn-3", is_flash_attn_3_available),
    }.get(flash, ("kernels", is_kernels_available))
    return None if torch.cuda.is_available() and there() else package


_MOST_PADDING = 2  # documents become rows of equal length if their places are at most this many times the tokens


@dataclass
class Documents:
    """Boundaries of the documents in a batch, and the IDs of modules that respect the boundaries.

    With a `context`, each rank has a part of every row, and `length` counts the padded, whole rows.
    """

    rows: int
    length: int  # tokens per row
    starts: list[int]  # start of each document in the flattened rows, then the total number of tokens
    context: Context | None = None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))  # of the tokens
    seen: set[int] = field(default_factory=set)
    part_masks: dict[Any, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, position_ids: Tensor, context: Context | None = None) -> Self | None:
        """Find the documents in position_ids [batch, length]; the positions of each document start at 0.

        Returns None if each row is a single document and there is no context. Meta or fake position_ids, as in a memory
        plan, count as one document per row, so a plan estimates attention without packing.
        """
        rows, length = position_ids.shape
        starts = [*range(0, rows * length, length)]
        if has_values(position_ids):
            found = (position_ids.flatten() == 0).nonzero().flatten().tolist()
            assert set(starts) <= set(found), "a row begins with a document"
            starts = found
        if len(starts) == rows and context is None:
            return None
        return cls(rows, length, [*starts, rows * length], context, position_ids.device)

    def __iter__(self) -> Iterator[tuple[int, slice]]:
        """Yield (row, slice within the row) of each document, in order."""
        for start, stop in itertools.pairwise(self.starts):
            row, begin = divmod(start, self.length)
            yield row, slice(begin, begin + stop - start)

    @cached_property
    def as_rows(self) -> tuple[Tensor, Tensor] | None:
        """Places to make a row of each document, [documents, longest], and the place of each token in these rows.

        Places are indices of flattened rows; the padding at the end of a short document repeats a token. None if most
        places were padding: then calls for single documents are faster.
        """
        lengths = [stop - start for start, stop in itertools.pairwise(self.starts)]
        longest, tokens = max(lengths), self.starts[-1]
        if len(lengths) == self.rows or len(lengths) * longest > _MOST_PADDING * tokens:
            return None
        starts, steps = torch.tensor(self.starts[:-1])[:, None], torch.arange(longest)
        rows = (starts + steps).clamp(max=tokens - 1)
        back = (steps < torch.tensor(lengths)[:, None]).flatten().nonzero()[:, 0]
        return rows.to(self.device), back.to(self.device)

    def numbers(self) -> Tensor:
        """Return the document index of each token [batch, length], counted from 1."""
        numbers = torch.zeros(self.rows * self.length, dtype=torch.long)
        numbers[self.starts[:-1]] = 1
        return numbers.cumsum(0).view(self.rows, self.length)

    def mask(self) -> Tensor:
        """Return the causal mask within documents, boolean [batch, 1, length, length]."""
        numbers = self.numbers()
        return (numbers[:, :, None] == numbers[:, None]).tril()[:, None]

    def mask_of_part(self, mask: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Return the additive mask [rows or 1, 1, share, length] of the queries in this rank's part.

        mask: the mask of whole rows; None or without keys: causal. Blocks share the result, so that only one copy of it
        is in memory.
        """
        assert self.context is not None
        mask, place = mask if mask is not None and mask.shape[-1] else None, self.context.place(self.length)
        if mask is not None and mask.dtype != torch.bool:
            return mask[..., place, :]
        if (mask, dtype) not in self.part_masks:
            if mask is None:
                share = place.stop - place.start
                seen = torch.ones(1, 1, share, self.length, dtype=torch.bool, device=self.device).tril(place.start)
            else:
                seen = (mask if mask.stride(0) else mask[:1])[..., place, :]  # transformers expands a mask to all rows
            if len(self.starts) > self.rows + 1:
                numbers = self.numbers().to(self.device)
                seen = seen & (numbers[:, place, None] == numbers[:, None])[:, None]
            made = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
            self.part_masks[mask, dtype] = made.masked_fill_(~seen, -torch.inf)
        return self.part_masks[mask, dtype]

    @cached_property
    def keys_of_part(self) -> tuple[Tensor, dict[str, Any]]:
        """Places of the keys that the queries in this rank's part see, in flattened rows, and arguments for flash.

        Flash attention aligns the last query of a document with its last key.
        """
        assert self.context is not None
        part, places = self.context.place(self.length), []
        queries, keys = [0], [0]
        for row, place in self:
            start, stop = max(place.start, part.start), min(place.stop, part.stop)
            if start < stop:
                places.append(torch.arange(place.start, stop) + row * self.length)
                queries.append(queries[-1] + stop - start)
                keys.append(keys[-1] + stop - place.start)
        return torch.cat(places).to(self.device), _lengths(queries, keys, self.device)

    def arguments(self, attention: str, uniform: bool, device: torch.device) -> dict[str, Any]:
        """Return arguments for a transformers model's forward. `uniform`: every block uses full causal attention.

        Otherwise, transformers makes the masks. With a context, an argument tells it the length of whole rows.
        """
        if attention == "sdpa":
            # transformers passes a 4-D mask on unchanged, and does not build a dense mask. This mask has no keys, so
            # attention that ignores `documents` fails on it.
            length = self.context.share(self.length) if self.context else self.length
            unread = torch.empty(self.rows, 1, length, 0, dtype=torch.bool, device=device)
            if not uniform and self.context is not None:
                unread = torch.ones(self.rows, self.length, dtype=torch.bool, device=device)
            return {"documents": self} | ({"attention_mask": unread} if uniform or self.context is not None else {})
        if attention == "eager":
            return {"attention_mask": self.mask().to(device)}
        return {"documents": self} | _lengths(self.starts, self.starts, device)

    def check_seen(self, blocks: Iterable[nn.Module]) -> None:
        """Raise ConfigError for a block that has parameters but no module that respects the document boundaries.

        Blocks of an MLP alone compute each token by itself.
        """
        for number, block in enumerate(blocks):
            by_token = next(block.parameters(), None) is None or getattr(block, "block_type", "") in ("mlp", "moe")
            if not by_token and not any(id(module) in self.seen for module in block.modules()):
                raise ConfigError(
                    f"model: block {number} ({type(block).__name__}) ignores document boundaries and cannot split a "
                    f"sequence across ranks; use a different model, or train without packing, document_mask and "
                    f"context_parallel"
                )


def _lengths(queries: list[int], keys: list[int], device: torch.device) -> dict[str, Any]:
    """Return flash attention's arguments for documents that start at these places in flattened queries and keys."""
    found: dict[str, Any] = {}
    for name, starts in (("q", queries), ("k", keys)):
        found[f"cu_seq_lens_{name}"] = torch.tensor(starts, dtype=torch.int32, device=device)
        found[f"max_length_{name}"] = max(stop - start for start, stop in itertools.pairwise(starts))
    return found


Compute = Callable[..., tuple[Tensor, Any]]
# Computes attention with dropout: calls its first argument for groups of the heads of query, key and value, and joins
# the outputs [batch, length, heads, width].
ByHeads = Callable[[Compute, Tensor, Tensor, Tensor], tuple[Tensor, Any]]


def _sdpa(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Call transformers' sdpa attention; on CPUs, our own kernel for dropout and for short sequences in bf16."""
    if attention_mask is not None and (groups := query.shape[1] // key.shape[1]) != getattr(
        module, "num_key_value_groups", groups
    ):  # an exchange of heads repeats key heads, but transformers repeats them `num_key_value_groups` times
        module, key, value = nn.Identity(), key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    plain = (
        (getattr(module, "is_causal", True) if is_causal is None else is_causal)
        and attention_mask is None
        and position_bias is None
        and query.shape == key.shape == value.shape
    )
    on_cpu = cpu_attention.on_cpu(query.device)
    if plain and on_cpu and (dropout or (query.shape[2] <= cpu_attention.SHORT and value.dtype == torch.bfloat16)):
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        return cpu_attention.attention(query, key, value, scale, dropout).transpose(1, 2).contiguous(), None
    with mkl_products() if query.shape[2] == 1 and on_cpu else nullcontext():
        return sdpa_attention_forward(
            module,
            query,
            key,
            value,
            attention_mask,
            dropout=dropout,
            scaling=scaling,
            is_causal=is_causal,
            position_bias=position_bias,
            **kwargs,
        )


def _each_apart(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    documents: Documents | None = None,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Call transformers' sdpa attention once per document, and return the output [batch, length, heads, width]."""
    if documents is None:
        return _sdpa(module, query, key, value, attention_mask, position_bias=position_bias, **kwargs)
    mask = attention_mask if attention_mask is not None and attention_mask.shape[-1] else None
    if len(documents.starts) == documents.rows + 1:
        return _sdpa(module, query, key, value, mask, position_bias=position_bias, **kwargs)

    def within(mask: Tensor | None, row: int, place: slice) -> Tensor | None:
        return None if mask is None else (mask[row : row + 1] if mask.shape[0] > 1 else mask)[..., place, place]

    if mask is None and position_bias is None and not kwargs.get("dropout") and documents.as_rows is not None:
        rows, back = documents.as_rows
        parts = (x.transpose(1, 2).flatten(0, 1)[rows].transpose(1, 2) for x in (query, key, value))
        found = _sdpa(module, *parts, None, **kwargs)[0].flatten(0, 1)[back]
        return found.view(query.shape[0], query.shape[2], *found.shape[1:]), None
    outputs = []
    for row, place in documents:
        part = slice(row, row + 1), slice(None), place
        own = query[part], key[part], value[part], within(mask, row, place)
        outputs.append(_sdpa(module, *own, position_bias=within(position_bias, row, place), **kwargs)[0])
    return torch.cat(outputs, 1).view(query.shape[0], query.shape[2], *outputs[0].shape[2:]), None


@dataclass
class _Seen:
    """A proxy for a module or its configuration that returns transformers' own name for the attention."""

    of: Any
    _attn_implementation: str

    def __getattr__(self, name: str) -> Any:
        return getattr(self.of, name)

    @property
    def config(self) -> Self:
        return type(self)(self.of.config, self._attn_implementation)


def _computed_by(name: str, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
    """Call transformers' attention function `name`."""
    if name == "eager":  # each model family defines this function in its own module
        return sys.modules[type(module).__module__].eager_attention_forward(module, *args, **kwargs)
    compute: Compute = _each_apart if name == "sdpa" else ALL_ATTENTION_FUNCTIONS[name]
    return compute(_Seen(module, name) if is_flash(name) else module, *args, **kwargs)


def _with_whole_keys(
    compute: Compute,
    by: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    documents: Documents,
) -> tuple[Tensor, Any]:
    """Compute attention of this rank's queries [batch, heads, share, width] to the keys of all ranks."""
    assert documents.context is not None
    key, value = documents.context.whole(key), documents.context.whole(value)
    if is_flash(by):
        places, lengths = documents.keys_of_part
        key, value = (x.transpose(1, 2).flatten(0, 1)[places].transpose(0, 1)[None] for x in (key, value))
        return compute(query, key, value, **lengths)
    mask = documents.mask_of_part(attention_mask, query.dtype)
    return compute(query, key, value, attention_mask=mask, **({"documents": None} if by == "sdpa" else {}))


def register_attention(name: str, masked: str) -> str:
    """Register a wrapper of transformers' attention function `name`, and return the wrapper's name.

    `eager` is not wrapped. The wrapper records each module that calls it in its argument `documents`, and performs the
    collectives of context parallelism. With an attention mask, cached keys, or meta or fake tensors, the wrapper calls
    `masked` (sdpa or eager) instead.
    """
    own = f"crosstrain_{name}_or_{masked}".replace("/", "_")
    if name == "eager" or own in ALL_ATTENTION_FUNCTIONS:
        return name if name == "eager" else own
    drops = not is_flash(name) or "dropout_p" in inspect.signature(lazy_import_flash_attention(name)[0][1]).parameters

    def mask(*, q_length: int, kv_length: int, attention_mask: Tensor | None = None, **kwargs: Any) -> Any:
        if q_length != kv_length and kwargs["q_offset"] == 0:  # from `Documents.arguments`: this rank has parts of rows
            q_length, attention_mask = kv_length, None
        seen_by = masked if attention_mask is not None or q_length != kv_length or detect_fake_mode() else name
        return ALL_MASK_ATTENTION_FUNCTIONS[seen_by](
            q_length=q_length, kv_length=kv_length, attention_mask=attention_mask, **kwargs
        )

    def attend(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any,
        *,
        documents: Documents | None = None,
        by_heads: ByHeads | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Any]:
        """Compute attention. With a context, the inputs and the output have the length of this rank's part."""
        by = name
        if isinstance(attention_mask, Tensor) or query.shape[2] != key.shape[2] or not has_values(query):
            by = masked
        if (dropout := kwargs.get("dropout")) and by == name and not drops:
            raise ConfigError(
                f"model.attention: {name} does not support dropout, but the model's rate is {dropout}; set it to 0"
            )
        if is_flash(by) and query.is_cuda and query.dtype == torch.float32 and not torch.is_autocast_enabled("cuda"):
            raise ConfigError(
                f"model.attention: {name} supports only bf16 and fp16; set run.amp to one of them, or use sdpa"
            )
        if documents is not None:
            documents.seen.add(id(module))
            if by == "sdpa":
                kwargs["documents"] = documents
        compute = partial(_computed_by, by, module, attention_mask=attention_mask, **kwargs)
        if dropout and by_heads is not None:
            compute = partial(by_heads, compute)
        if documents is None or documents.context is None:
            return compute(query, key, value)
        if query.shape[1] % documents.context.size == 0:
            return documents.context.to_parts(compute(*documents.context.to_heads(query, key, value))[0]), None
        return _with_whole_keys(compute, by, query, key, value, attention_mask, documents)

    ALL_ATTENTION_FUNCTIONS.register(own, attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register(own, mask)
    return own
