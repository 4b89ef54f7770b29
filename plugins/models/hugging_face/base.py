"""The base class for transformers' causal language models, whose modules are unmodified."""

import inspect
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import torch
from annotated_types import Interval
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from crosstrain import IGNORE_INDEX, PLAIN, ConfigError, ForwardMode, LanguageModel, Logits, has_values

from . import internals
from .attention import Documents, choose_attention, register_attention
from .export import TransformersExport
from .structure import TransformersStructure
from .tables import COMPARE_NAMES
from .weights import TransformersWeights

# Keys that determine the shapes of weights, under the names that all configurations share.
SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "tie_word_embeddings",
)  # fmt: skip
LARGEST_SIZE, MOST_LAYERS = 10_000_000, 10_000
Size = Annotated[int, Interval(ge=1, le=LARGEST_SIZE)]  # vocabulary size, width, length or number of heads
Layers = Annotated[int, Interval(ge=1, le=MOST_LAYERS)]
DropRate = Annotated[float, Interval(ge=0, lt=1)]


def check_published(published: PreTrainedConfig, given: Mapping[str, Any], source: Path) -> None:
    """Raise ConfigError if a given size differs from the configuration in the folder `source`."""
    for key, value in given.items():
        if (theirs := getattr(published, key, None)) != value:
            raise ConfigError(f"model: {key} is {value}, and the weights in {source} have {theirs}; leave it out")


class TransformersModel(LanguageModel):
    """A `...ForCausalLM` model from transformers, built from a `padded` configuration.

    Subclasses build the module. Their options have a field `make_vocab_size_divisible_by`.
    """

    lm: PreTrainedModel

    def __init__(self, options: Any, config: PreTrainedConfig, lm: PreTrainedModel, source: Path | None) -> None:
        """Wrap `lm`. config: without padding. source: folder of the initial weights; None: random initialization."""
        super().__init__(options)
        self.config, self.lm, self.source = config, lm, source
        self._block_lists = internals.block_lists(lm)
        self.text_config = text = config.get_text_config()
        self.attention = self._under_masks = lm.config._attn_implementation
        if self.attention not in ("sdpa", "eager"):  # other kernels take no masks, but generation needs masks
            self._under_masks = choose_attention(None, type(lm), lm.config)
        if self.attention != "sdpa" or config.model_type not in COMPARE_NAMES:
            lm.config._attn_implementation = register_attention(self.attention, self._under_masks)
        kinds = set(getattr(text, "layer_types", None) or ["full_attention"])
        windows = [getattr(text, key, None) for key in ("sliding_window", "attention_chunk_size")]
        self.sees_all = kinds == {"full_attention"} and not any(windows)  # every block uses full causal attention
        words = (lm.get_input_embeddings(), lm.get_output_embeddings())
        if getattr(words[0], "num_embeddings", None) != lm.config.get_text_config().vocab_size:
            raise ConfigError(f"model: {config.model_type} embeds more than the tokens of its vocabulary")
        if internals.routers_of(lm):
            lm.config.output_router_logits = False  # hooks record them
        self.product = internals.head_product(lm)  # None: logits come from the model's own forward
        takes = inspect.signature((lm if self.product is None else lm.base_model).forward).parameters
        self.takes_positions = "position_ids" in takes
        # transformers 5.24 renamed this parameter. A model with neither one recomputes all tokens in every step.
        self._cache_name = next((name for name in ("cache", "past_key_values") if name in takes), None)
        self.structure, self.weights = TransformersStructure(self), TransformersWeights(self)
        self.export = TransformersExport(self)

    def forward(
        self, input_ids: Tensor | None = None, labels: Tensor | None = None, cache: Any = None,
        inputs_embeds: Tensor | None = None, attention_mask: Tensor | None = None, position_ids: Tensor | None = None,
        mode: ForwardMode = PLAIN, **others: Any,
    ) -> Tensor:  # fmt: skip
        """Implement `LanguageModel.forward`; `others`, such as pixel_values, are passed to the library's module."""
        context = None  # without labels, every rank has whole sequences
        if labels is not None and (context := self.context) is not None:
            assert input_ids is not None, "who gives embeddings has refused to share sequences"
            assert attention_mask is None
            if position_ids is None:
                position_ids = torch.arange(input_ids.shape[1], device=input_ids.device).expand(input_ids.shape)
            # The padding joins a row's last document; causal attention hides it from the real tokens.
            position_ids = context.padded(position_ids, 1)
            input_ids, labels = context.part(input_ids), context.part(labels, IGNORE_INDEX)
        more: dict[str, Any] = others | {"inputs_embeds": inputs_embeds, "position_ids": position_ids}
        if self._cache_name is not None:
            more[self._cache_name] = cache
        documents, attention = None, self.attention
        given = input_ids if inputs_embeds is None else inputs_embeds
        if attention_mask is not None or cache is not None or (given is not None and not has_values(given)):
            attention = self._under_masks  # also in a plan, which can only trace torch's kernels
        if attention_mask is not None:
            more["attention_mask"] = attention_mask
        elif position_ids is not None and cache is None and (documents := Documents.of(position_ids, context)):
            more |= documents.arguments(attention, self.sees_all, position_ids.device)
            if context is not None:
                more["position_ids"] = context.part(position_ids)
        if "attention_mask" in more:
            more["attention_mask"] = self._mask(more["attention_mask"], attention)
        more = {key: value for key, value in more.items() if value is not None}  # models may lack these parameters
        if (routers := self.routers) is not None and labels is not None and self.training:
            routers.begin()
        else:
            routers = None
        # If the head is a plain linear layer, skip it, so that the full logits are never materialized.
        called: nn.Module = self.lm if self.product is None else self.lm.base_model
        out = called(input_ids, use_cache=cache is not None, **more)
        if documents is not None and attention != "eager" and has_values(out[0]):  # skipped in a plan
            documents.check_seen(self.blocks())
        if self.product is None:
            result = mode.output(out.logits, None, labels, self.vocab_size)
            if self.training and labels is not None and getattr(out, "aux_loss", None) is not None:
                # If config.output_router_logits is set and the routers are not watched, add transformers' router loss.
                coefficient: Any = getattr(self.lm, "router_aux_loss_coef", getattr(self.lm, "aux_loss_coef", 0.0))
                result = mode.head.add(result, coefficient * out.aux_loss * (labels != IGNORE_INDEX).sum())
        else:
            head = self.lm.get_output_embeddings()
            logits = Logits(head.bias, *self.product)
            result = mode.output(out.last_hidden_state, head.weight, labels, self.vocab_size, logits)
        if context is not None and result.ndim == 0:  # otherwise hidden states, for a later pipeline stage
            result = context.total(result)
        if labels is None or routers is None:
            return result
        return mode.head.add(result, routers.loss(labels, documents))

    def _mask(self, seen: Any, attention: str) -> Any:
        """Convert a mask [batch, 1, length, past + length] to the form required by the attention implementation."""
        if attention != "eager" or seen.dtype != torch.bool or seen.ndim != 4:
            return seen
        device = seen.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else torch.float32
        return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, torch.finfo(dtype).min)

    def blocks(self) -> list[nn.Module]:
        return [block for blocks in self._block_lists for block in blocks]

    def embed(self, input_ids: Tensor) -> Tensor:
        return self.lm.get_input_embeddings()(input_ids)

    @cached_property
    def skeleton(self) -> PreTrainedModel:
        """A model of the same class whose matrices have no memory; it is never sharded."""
        return internals.skeleton(self.lm, self.config)

    @property
    def num_experts(self) -> int:
        """Number of experts per layer; 0 for a dense model."""
        return getattr(self.text_config, "num_local_experts", getattr(self.text_config, "num_experts", 0)) or 0

    @property
    def hidden_size(self) -> int:
        return self.text_config.hidden_size

    @property
    def vocab_size(self) -> int:
        return self.text_config.vocab_size

    @property
    def max_length(self) -> int | None:
        return getattr(self.text_config, "max_position_embeddings", None)

    def new_cache(self) -> DynamicCache | None:
        """Return None for a model with its own kind of cache, such as Mamba, so that it recomputes all tokens."""
        model: Any = self.lm
        if self._cache_name is None or not model._supports_default_dynamic_cache():
            return None
        cache = DynamicCache(config=self.lm.config)
        # Pure linear-attention models ask the cache for its length, and only attention layers have one.
        return cache if not cache.layers or any(isinstance(x, DynamicLayer) for x in cache.layers) else None
