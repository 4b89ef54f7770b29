"""The base class for unmodified causal language models from transformers, and classes that describe them."""

import copy
import inspect
from collections.abc import Iterator, Mapping
from contextlib import suppress
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, ClassVar

import torch
from annotated_types import Interval
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from crosstrain import (
    IGNORE_INDEX,
    PLAIN,
    ConfigError,
    DataError,
    Ends,
    Export,
    ForwardMode,
    LanguageModel,
    Logits,
    Structure,
    Weights,
    has_values,
)
from crosstrain.inference.cache import GrowingCache
from crosstrain.modeling.activation_checkpointing import Mode
from crosstrain.modeling.weights import Place, Stack
from crosstrain.utils.assets import GENERATION_CONFIG, copy_files, plain_files

from . import internals
from .attention import Documents, choose_attention, register_attention
from .recurrent import FULL_OR_NO_ATTENTION, recurrent_layers, split_recurrent

# Keys that determine the shapes of weights, under the names that all configurations share.
SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "tie_word_embeddings",
)  # fmt: skip
LARGEST_SIZE, MOST_LAYERS = 10_000_000, 10_000
Size = Annotated[int, Interval(ge=1, le=LARGEST_SIZE)]  # vocabulary size, width, length or number of heads
Layers = Annotated[int, Interval(ge=1, le=MOST_LAYERS)]
DropRate = Annotated[float, Interval(ge=0, lt=1)]
# transformers' name -> our name for a style in `Structure.tensor_parallel_plan`.
_STYLES = {
    "colwise": "column", "rowwise": "row", "replicated_with_grad_allreduce": "summed",
    "embedding_rowwise": "vocabulary",  # older transformers versions use this style for tied embeddings
    "moe_tp_experts": "experts",
}  # fmt: skip
# Stacked expert weight -> names of its parts in a single MLP: first the names in most families, then Mixtral's.
_EXPERT_PARTS = {"gate_up_proj": (("gate_proj", "up_proj"), ("w1", "w3")), "down_proj": (("down_proj",), ("w2",))}


def check_published(published: PreTrainedConfig, given: Mapping[str, Any], source: Path) -> None:
    """Raise ConfigError if a given size differs from the configuration in the folder `source`."""
    for key, value in given.items():
        if (theirs := getattr(published, key, None)) != value:
            raise ConfigError(f"model: {key} is {value}, but the weights in {source} have {theirs}; leave {key} out")


class TransformersModel(LanguageModel):
    """A `...ForCausalLM` model from transformers, built by `build_transformers`.

    Subclasses build the module, and their options have a field `make_vocab_size_divisible_by`.
    """

    lm: PreTrainedModel
    splits_embeddings = False  # True: with context parallelism, the module gets whole rows, and splits their embeddings
    cache_type: ClassVar[type[GrowingCache]] = GrowingCache
    base_model_prefix: ClassVar = ""  # transformers reads this of a model with an adapter, to scope renamed weights

    def __init__(self, options: Any, config: PreTrainedConfig, lm: PreTrainedModel, source: Path | None) -> None:
        """Wrap `lm`. `config` is not padded. `source`: folder of the initial weights; None: random initialization."""
        super().__init__(options)
        self.config, self.lm, self.source = config, lm, source
        self._block_lists = internals.block_lists(lm)
        self.recurrent = split_recurrent(self.blocks())
        self.text_config = text = config.get_text_config()
        self.attention = self._under_masks = lm.config._attn_implementation
        if self.attention not in ("sdpa", "eager"):  # other kernels take no masks, but generation needs masks
            self._under_masks = choose_attention(None, type(lm), lm.config)
        if self.attention != "sdpa" or config.model_type not in internals.COMPARE_NAMES:
            lm.config._attn_implementation = register_attention(self.attention, self._under_masks)
        kinds = set(getattr(text, "layer_types", None) or ["full_attention"]) - (
            FULL_OR_NO_ATTENTION if self.recurrent else set()
        )
        if not kinds:  # without attention, it does not matter that transformers would choose eager
            self.attention = "sdpa"
        self.has_dense_masks = config.model_type in internals.DENSE_MASKS
        windows = [getattr(text, key, None) for key in ("sliding_window", "attention_chunk_size")]
        self.sees_all = kinds <= {"full_attention"} and not any(windows)  # all attention is full and causal
        # False: a rank that has a part of a row cannot make the masks of whole rows. transformers makes the masks of
        # windows, but families without flash attention may change these masks.
        has_masks = kinds <= {"full_attention", "sliding_attention"} and lm._supports_flash_attn
        self.shares_rows = self.sees_all or has_masks
        if getattr(lm.get_input_embeddings(), "num_embeddings", None) != lm.config.get_text_config().vocab_size:
            raise ConfigError(f"model: {config.model_type} does not have one embedding per token of its vocabulary")
        if internals.routers_of(lm):
            lm.config.output_router_logits = False  # hooks record the router logits
        self.product = internals.head_product(lm)  # None: logits come from the model's own forward
        takes = inspect.signature((lm if self.product is None else lm.base_model).forward).parameters
        self.takes_positions = "position_ids" in takes
        self.mixes_documents = config.model_type in internals.WITHOUT_DOCUMENTS or (
            not self.recurrent and (not self.takes_positions or getattr(lm, "_is_stateful", False))
        )
        # transformers 5.24 renamed this parameter. A model without the parameter recomputes all tokens in every step.
        self._cache_name = next((name for name in ("cache", "past_key_values") if name in takes), None)
        self.structure, self.weights = TransformersStructure(self), TransformersWeights(self)
        self.export = TransformersExport(self)

    def forward(
        self, input_ids: Tensor | None = None, labels: Tensor | None = None, cache: Any = None,
        inputs_embeds: Tensor | None = None, attention_mask: Tensor | None = None, position_ids: Tensor | None = None,
        mode: ForwardMode = PLAIN, rotary: Tensor | None = None, **others: Any,
    ) -> Tensor:  # fmt: skip
        """Implement `LanguageModel.forward`; `others`, such as pixel_values, are passed to the library's module.

        rotary: positions [batch, length] or [axes, batch, length] for rotary embeddings; None: `position_ids`, which
        count tokens.
        """
        context = None  # without labels, every rank has whole sequences
        if labels is not None and (context := self.context) is not None:
            if position_ids is None:
                position_ids = torch.arange(labels.shape[1], device=labels.device).expand(labels.shape)
            # The padding joins a row's last document; causal attention hides it from the real tokens.
            position_ids = context.padded(position_ids, 1)
            rotary = position_ids if rotary is None else context.padded(rotary, 0)
            labels = context.part(labels, IGNORE_INDEX)
            if input_ids is not None:
                input_ids = context.padded(input_ids, 0) if self.splits_embeddings else context.part(input_ids)
            elif inputs_embeds is not None:
                inputs_embeds = context.part(inputs_embeds.mT).mT
        more: dict[str, Any] = others | {"inputs_embeds": inputs_embeds}
        # Without this parameter, recurrent layers need no positions. Other models must fail, not mix documents.
        if self.takes_positions or self.mixes_documents:
            more["position_ids"] = position_ids
        if self._cache_name is not None:
            more[self._cache_name] = cache
        documents, attention = None, "eager" if self.has_dense_masks else self.attention
        given = input_ids if inputs_embeds is None else inputs_embeds
        if attention_mask is not None or cache is not None or (given is not None and not has_values(given)):
            attention = self._under_masks  # also in a memory plan, because only torch's kernels can be traced
        if attention_mask is not None:
            more["attention_mask"] = attention_mask
            if context is not None:  # attention sees whole rows, so the mask is that of whole rows
                rows, length = attention_mask.shape[0], attention_mask.shape[-1]
                more["documents"] = documents = Documents(rows, length, [*range(0, rows * length + 1, length)], context)
        elif position_ids is not None and cache is None and (documents := Documents.of(position_ids, context)):
            more |= documents.arguments(attention, self.sees_all, position_ids.device)
            if self.recurrent:
                more["documents"] = documents
        if rotary is not None:
            more["position_ids"] = rotary if context is None else context.part(rotary)
        if "attention_mask" in more:
            more["attention_mask"] = self._mask(more["attention_mask"], attention)
        more = {key: value for key, value in more.items() if value is not None}  # some models lack these arguments
        if (routers := self.routers) is not None and labels is not None and self.training:
            routers.begin()
        else:
            routers = None
        # If the head is a plain linear layer, skip it, so that the full logits are never materialized.
        called: nn.Module = self.lm if self.product is None else self.lm.base_model
        out = called(input_ids, use_cache=cache is not None, **more)
        if documents is not None and has_values(out[0]):  # a plan skips this check
            blocks = self.structure.decoder_blocks()
            documents.check_seen([*(blocks if attention != "eager" else []), *self.structure.by_document()])
        result = self._result(out, labels, mode)
        if context is not None and result.ndim == 0:  # otherwise `result` is hidden states for a later pipeline stage
            result = context.total(result)
        return result if labels is None or routers is None else mode.head.add(result, routers.loss(labels, documents))

    def _result(self, out: Any, labels: Tensor | None, mode: ForwardMode) -> Tensor:
        """Return what `mode` asks for, from the output of the library's module."""
        if self.product is not None:
            head = self.lm.get_output_embeddings()
            return mode.output(
                out.last_hidden_state, head.weight, labels, self.vocab_size, Logits(head.bias, *self.product)
            )
        result = mode.output(out.logits, None, labels, self.vocab_size)
        if self.training and labels is not None and getattr(out, "aux_loss", None) is not None:
            # If config.output_router_logits is set and the routers are not watched, add transformers' router loss.
            coefficient: Any = getattr(self.lm, "router_aux_loss_coef", getattr(self.lm, "aux_loss_coef", 0.0))
            result = mode.head.add(result, coefficient * out.aux_loss * (labels != IGNORE_INDEX).sum())
        return result

    @property
    def decoder(self) -> Any:
        """The language model without its head."""
        return self.lm.base_model

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
        """A model of the same class with its matrices on the meta device; it is never sharded."""
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

    def new_cache(self) -> GrowingCache | None:
        """Return an empty cache; None for a model with its own cache type, such as Mamba: it recomputes all tokens."""
        model: Any = self.lm
        if self._cache_name is None or not model._supports_default_dynamic_cache():
            return None
        cache = self.cache_type(self.lm.config)
        # Pure linear-attention models ask the cache for its length, but only attention layers have a length.
        return cache if not cache.layers or any(isinstance(x, DynamicLayer) for x in cache.layers) else None


class TransformersStructure(Structure):
    """The structure of a model, read from its modules and its configuration in transformers."""

    model: TransformersModel

    def check_documents(self) -> None:
        family = self.model.config.model_type
        if self.model.mixes_documents:
            raise ConfigError(
                f"model: {family} cannot keep documents apart: it takes no position_ids, or its layers cross boundaries"
            )
        if (self.model.attention == "eager" and not self.model.sees_all) or (
            self.model.has_dense_masks and self.model.attention not in ("sdpa", "eager")
        ):
            raise ConfigError(
                f"model.attention: {self.model.attention} cannot keep documents apart in this {family} model; use "
                f"sdpa, or a model with full attention"
            )

    def check_context(self, ranks: int) -> None:
        family = self.model.config.model_type
        if self.model.mixes_documents or self.model.has_dense_masks or not self.model.shares_rows:
            raise ConfigError(
                f"run.runner.context_parallel: ranks cannot share sequences of {family}, because this needs "
                f"position_ids, full or sliding-window causal attention, and recurrent layers that take documents; "
                f"leave context_parallel out"
            )
        if self.model.attention == "eager":
            raise ConfigError(
                "model.attention: eager needs whole sequences; with context_parallel, use sdpa or flash attention"
            )

    def ends(self) -> Ends | None:
        decoder, head = self.model.decoder, self.model.lm.get_output_embeddings()
        _, plan = internals.plans_of(decoder)
        blocks = [name for name in plan if isinstance(getattr(decoder, name, None), nn.ModuleList)]
        if len(blocks) != 1 or self.model.product is None:
            return None
        names = {module: name for name, module in self.model.named_modules()}
        own, at = [f"{names[decoder]}.{name}" for name in plan], plan.index(blocks[0])
        return Ends(own[:at], [*own[at + 1 :], names[head]])

    def by_document(self) -> list[nn.Module]:
        return recurrent_layers(self.decoder_blocks())

    def experts(self) -> dict[str, nn.Module]:
        return {name: module for name, module in self.model.named_modules() if internals.holds_experts(module)}

    def tensor_parallel_plan(self) -> dict[str, str]:
        """Return transformers' plan, with a sharded vocabulary; {} if there is no plan or a style is not supported."""
        theirs, _ = internals.plans_of(self.model.decoder)
        for stack in [pattern for pattern, style in theirs.items() if style == "moe_tp_experts"]:
            theirs = {pattern: style for pattern, style in theirs.items() if not pattern.startswith(f"{stack}.")}
        if not theirs or not set(theirs.values()) <= _STYLES.keys():
            return {}
        (prefix,) = (name for name, module in self.model.lm.named_modules() if module is self.model.decoder)
        plan = {f"{prefix}.{pattern}".removeprefix("."): _STYLES[style] for pattern, style in theirs.items()}
        # A plan is shared by a model family, and may name layers that this configuration does not have.
        names = [
            self.model.weights.canonical_name(name)
            for name, _ in (*self.model.named_modules(), *self.model.named_parameters())
        ]
        plan = {pattern: style for pattern, style in plan.items() if any(fnmatchcase(name, pattern) for name in names)}
        words, head = self.model.lm.get_input_embeddings(), self.model.lm.get_output_embeddings()
        cut = (words,) if words.weight is head.weight and head.bias is None else (words, head)
        if self.model.product is None:  # all ranks compute all logits
            return plan
        return plan | {name: "vocabulary" for name, module in self.model.lm.named_modules() if module in cut}

    def checkpointing(self, mode: Mode) -> list[tuple[list[nn.Module], Mode]]:
        if mode == "offload" and any(routers.has_loss for routers in self.routers()):
            raise ConfigError(
                "run.gradient_checkpointing: offload does not support a router loss; use full, or set "
                "model.router_loss=none"
            )
        return super().checkpointing(mode)

    def _matrices(self, experts: bool) -> Iterator[tuple[int, float]]:
        """Yield each module's matrix size and the fraction used per token. experts: skip modules without experts."""
        for module in self.model.skeleton.modules():  # the skeleton is never sharded
            expert = internals.holds_experts(module)
            if not isinstance(module, nn.Embedding) and expert >= experts:
                share = self.model.text_config.num_experts_per_tok / module.num_experts if expert else 1.0
                yield sum(p.numel() for p in module.parameters(recurse=False) if p.ndim > 1), share

    @property
    def idle_parameters(self) -> int:
        return sum(round(elements * (1 - share)) for elements, share in self._matrices(experts=True))

    def flops_per_token(self, sequence_length: int | None) -> float | None:
        """Count six operations per matrix element used by a token, plus attention (Narayanan et al., 2021, 5.1)."""
        length = sequence_length or self.model.max_length
        layers, heads = (getattr(self.model.config, key, None) for key in ("num_hidden_layers", "num_attention_heads"))
        composite = self.model.text_config is not self.model.config
        if composite or self.model.recurrent or not self.model.sees_all or not (length and layers and heads):
            return None
        width = heads * (getattr(self.model.config, "head_dim", None) or self.model.hidden_size // heads)
        used = sum(elements * share for elements, share in self._matrices(experts=False))
        return 6 * used + 12 * layers * width * length


def published_experts(name: str, available: set[str], experts: int) -> Place | None:
    """Find an expert parameter in a published folder, stacked or as one tensor per expert; None if it is absent."""
    for published in (name, name.replace(".mlp.", ".block_sparse_moe.")):
        stem, _, own = published.rpartition(".experts.")
        for parts in _EXPERT_PARTS.get(own, ()) if stem else ():
            names = [tuple(f"{stem}.experts.{n}.{part}.weight" for part in parts) for n in range(experts)]
            if names and available.issuperset(names[0]):
                return Stack(tuple(names))
        if published in available:
            return published
    return None


class TransformersWeights(Weights):
    """Uses transformers' names and initial values, and pads the vocabulary."""

    model: TransformersModel

    def __init__(self, model: TransformersModel) -> None:
        super().__init__(model)
        lm = model.lm
        self.vocabulary_multiple = model.options.make_vocab_size_divisible_by
        # The bias of a head may be registered under two tied names.
        words = (lm.get_input_embeddings(), lm.get_output_embeddings())
        rows = {id(p) for module in words if module is not None for p in module.parameters(recurse=False)}
        self._vocabulary = {n for n, p in lm.named_parameters(remove_duplicate=False) if id(p) in rows}

    def canonical_name(self, name: str) -> str:
        return name.removeprefix("lm.")

    def logical_shape(self, name: str, shape: torch.Size) -> torch.Size:
        return torch.Size((self.model.vocab_size, *shape[1:])) if name in self._vocabulary else shape

    def initialize(self, name: str, value: Tensor, rng: torch.Generator) -> None:
        """Fill `value` with transformers' initial value."""
        internals.initialize(self.model.skeleton, name, value, rng)

    def folder(self) -> Path | None:
        return self.model.source

    def place(self, name: str, available: set[str]) -> Place:
        """Return the name in the folder: with or without the base model's prefix, or the parts of an expert stack."""
        short = name.removeprefix(f"{self.model.lm.base_model_prefix}.")
        return name if name in available else published_experts(name, available, self.model.num_experts) or short


class TransformersExport(Export):
    """Exports the configuration without padding, and the generation settings of the pretrained model."""

    model: TransformersModel

    def __init__(self, model: TransformersModel) -> None:
        super().__init__(model)
        self._generation: list[Path] = []
        if model.source is not None:
            with suppress(DataError):  # the file cannot be copied, but the model does not need it
                self._generation = plain_files(model.source, {GENERATION_CONFIG})

    def save_config(self, folder: Path) -> None:
        config = copy.deepcopy(self.model.config)
        config.architectures = [type(self.model.lm).__name__]
        # dtype of the weights
        config.dtype = next((p.dtype for p in self.model.lm.parameters() if p.requires_grad), config.dtype)
        config.save_pretrained(folder)
        copy_files(self._generation, folder)
