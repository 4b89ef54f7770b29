"""The base class of transformers' causal language models, whose modules are unmodified."""

import copy
import inspect
from collections.abc import Iterator, Mapping
from contextlib import suppress
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import torch
from annotated_types import Interval
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from crosstrain.modeling import hf_internals
from crosstrain.modeling.activation_checkpointing import Mode
from crosstrain.modeling.attention import Documents, choose_attention, keep_documents
from crosstrain.modeling.base import Ends, LanguageModel
from crosstrain.modeling.cross_entropy import Logits
from crosstrain.modeling.forward_mode import PLAIN, ForwardMode
from crosstrain.modeling.meta_init import has_values
from crosstrain.modeling.pretrained import Place, Stack
from crosstrain.utils.assets import GENERATION_CONFIG, copy_files, plain_files
from crosstrain.utils.errors import ConfigError, DataError
from crosstrain.utils.types import IGNORE_INDEX

# Sizes of weights, under the names that every configuration knows.
SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "tie_word_embeddings",
)  # fmt: skip
LARGEST_SIZE, MOST_LAYERS = 10_000_000, 10_000
Size = Annotated[int, Interval(ge=1, le=LARGEST_SIZE)]  # of a vocabulary, a width, a length, or a number of heads
Layers = Annotated[int, Interval(ge=1, le=MOST_LAYERS)]
DropRate = Annotated[float, Interval(ge=0, lt=1)]

# transformers' names for the styles of `Model.tensor_parallel_plan`.
_STYLES = {
    "colwise": "column", "rowwise": "row", "replicated_with_grad_allreduce": "summed",
    "embedding_rowwise": "vocabulary",  # of tied embeddings, in older transformers
    "moe_tp_experts": "experts",
}  # fmt: skip


def check_published(published: PreTrainedConfig, given: Mapping[str, Any], source: Path) -> None:
    """Raise ConfigError for a size that differs from the configuration of the folder `source`."""
    for key, value in given.items():
        if (theirs := getattr(published, key, None)) != value:
            raise ConfigError(f"model: {key} is {value}, and the weights in {source} have {theirs}; leave it out")


# Parts of stacked weights of experts, by the names that a single MLP's have: of most families, and of Mixtral.
_EXPERT_PARTS = {"gate_up_proj": (("gate_proj", "up_proj"), ("w1", "w3")), "down_proj": (("down_proj",), ("w2",))}


def published_experts(name: str, available: set[str], experts: int) -> Place | None:
    """The place of a mixture's parameter in a folder that has a tensor for each expert; None if it is not there."""
    for published in (name, name.replace(".mlp.", ".block_sparse_moe.")):
        stem, _, own = published.rpartition(".experts.")
        for parts in _EXPERT_PARTS.get(own, ()) if stem else ():
            names = [tuple(f"{stem}.experts.{n}.{part}.weight" for part in parts) for n in range(experts)]
            if names and available.issuperset(names[0]):
                return Stack(tuple(names))
        if published in available:
            return published
    return None


def dense_place(name: str, available: set[str], experts: int) -> Place:
    """The place of a mixture's parameter in a dense model's folder, whose MLP every expert copies."""
    stem, _, own = name.rpartition(".experts.")
    copies = [tuple(f"{stem}.{part}.weight" for part in parts) for parts in _EXPERT_PARTS.get(own, ())]
    return next((Stack((names,) * experts) for names in copies if available.issuperset(names)), name)


class TransformersModel(LanguageModel):
    """A `...ForCausalLM`, made from a `padded` configuration.

    Subclasses construct it and implement `blocks`. Their options have `make_vocab_size_divisible_by`.
    """

    lm: PreTrainedModel

    def __init__(self, options: Any, config: PreTrainedConfig, lm: PreTrainedModel, source: Path | None) -> None:
        """Take `lm`, its `config` without padding, and the folder `source` of weights to start from, if any."""
        super().__init__(options)
        self.config, self.lm, self.source = config, lm, source
        self._generation: list[Path] = []  # settings of the pretrained model, which checkpoints keep
        if source is not None:
            with suppress(DataError):  # a link to elsewhere stays there; the model itself is sound
                self._generation = plain_files(source, {GENERATION_CONFIG})
        self.attention = self._under_masks = lm.config._attn_implementation
        if self.attention not in ("sdpa", "eager"):  # which alone take masks of batches that generate
            self._under_masks = choose_attention(None, type(lm), lm.config)
        keep_documents(self.attention)
        kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
        windows = [getattr(config, key, None) for key in ("sliding_window", "attention_chunk_size")]
        self._sees_all = kinds == {"full_attention"} and not any(windows)  # every block attends to the whole past
        words = (lm.get_input_embeddings(), lm.get_output_embeddings())
        if getattr(words[0], "num_embeddings", None) != lm.config.vocab_size:
            raise ConfigError(f"model: {config.model_type} embeds more than the tokens of its vocabulary")
        if hf_internals.routers_of(lm):
            lm.config.output_router_logits = False  # hooks give them
        self.measured = hf_internals.measured_logits(lm)  # None: only the model's own forward gives its logits
        takes = inspect.signature((lm if self.measured is None else lm.base_model).forward).parameters
        self.takes_positions = "position_ids" in takes
        # transformers 5.24 gave it another name. A model with neither gets all tokens again.
        self._cache_name = next((name for name in ("cache", "past_key_values") if name in takes), None)
        # A head may have a bias under two names, tied.
        rows = {id(p) for module in words if module is not None for p in module.parameters(recurse=False)}
        self._vocabulary = {n for n, p in lm.named_parameters(remove_duplicate=False) if id(p) in rows}

    def forward(  # type: ignore[override]
        self, input_ids: Tensor | None = None, labels: Tensor | None = None, cache: Any = None,
        inputs_embeds: Tensor | None = None, attention_mask: Tensor | None = None, position_ids: Tensor | None = None,
        mode: ForwardMode = PLAIN,
    ) -> Tensor:  # fmt: skip
        context = None  # every rank generates from whole sequences
        if labels is not None and (context := self.context) is not None:
            assert input_ids is not None, "who gives embeddings has refused to share sequences"
            assert attention_mask is None
            if position_ids is None:
                position_ids = torch.arange(input_ids.shape[1], device=input_ids.device).expand(input_ids.shape)
            # The padding belongs to a row's last document, which does not look ahead.
            position_ids = context.padded(position_ids, 1)
            input_ids, labels = context.part(input_ids), context.part(labels, IGNORE_INDEX)
        more: dict[str, Any] = {"inputs_embeds": inputs_embeds, "position_ids": position_ids}
        if self._cache_name is not None:
            more[self._cache_name] = cache
        documents, attention = None, self.attention
        given = input_ids if inputs_embeds is None else inputs_embeds
        if attention_mask is not None or cache is not None or (given is not None and not has_values(given)):
            attention = self._under_masks  # in a plan also, which knows no other kernels than torch's
        if attention_mask is not None:
            more["attention_mask"] = attention_mask
        elif position_ids is not None and cache is None and (documents := Documents.of(position_ids, context)):
            more |= documents.arguments(attention, self._sees_all, position_ids.device)
            if context is not None:
                more["position_ids"] = context.part(position_ids)
        elif attention == "flex_attention" and self._sees_all and given is not None:
            rows, length = given.shape[:2]  # transformers' own mask takes a minute to compile on a CPU
            whole = Documents(rows, length, [*range(0, rows * length + 1, length)])
            more["attention_mask"] = whole.blocks(given.device)
        if "attention_mask" in more:
            more["attention_mask"] = self._mask(more["attention_mask"], attention)
        more = {key: value for key, value in more.items() if value is not None}  # not every model knows all of them
        if (routers := self.routers) is not None and labels is not None and (self.training or mode.counts_choices):
            routers.begin()
        else:
            routers = None
        hf_internals.attend_by(self.lm, attention)
        # Without its head, if that is measured: then the logits never exist all at once.
        called: nn.Module = self.lm if self.measured is None else self.lm.base_model
        out = called(input_ids, use_cache=cache is not None, **more)
        if documents is not None and attention != "eager" and has_values(out[0]):  # not so in a plan
            documents.check_seen(self.blocks())
        if self.measured is None:
            result = mode.output(out.logits, None, labels, self.vocab_size)
            if self.training and labels is not None and getattr(out, "aux_loss", None) is not None:
                # Routers that are not watched, under config.output_router_logits: transformers' own loss of them.
                coefficient: Any = getattr(self.lm, "router_aux_loss_coef", getattr(self.lm, "aux_loss_coef", 0.0))
                result = mode.head.add(result, coefficient * out.aux_loss * (labels != IGNORE_INDEX).sum())
        else:
            head = self.lm.get_output_embeddings()
            logits = Logits(head.bias, *self.measured)
            result = mode.output(out.last_hidden_state, head.weight, labels, self.vocab_size, logits)
        if context is not None and result.ndim == 0:  # not so where another stage has the head
            result = context.total(result)
        if labels is None or routers is None:
            return result
        return mode.head.add(result, routers.loss(labels, documents, mode.counts_choices))

    def _mask(self, seen: Any, attention: str) -> Any:
        """A mask [batch, 1, length, past + length] in the form that the attention implementation takes."""
        if attention != "eager" or seen.dtype != torch.bool or seen.ndim != 4:
            return seen
        device = seen.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else torch.float32
        return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, torch.finfo(dtype).min)

    def embed(self, input_ids: Tensor) -> Tensor:
        return self.lm.get_input_embeddings()(input_ids)

    def check_documents(self) -> None:
        if not self.takes_positions:
            raise ConfigError(f"model: {self.config.model_type} takes no positions, so documents cannot be kept apart")
        if getattr(self.lm, "_is_stateful", False):
            raise ConfigError(f"model: {self.config.model_type} carries a state from document to document")
        if self.attention in ("eager", "flex_attention") and not self._sees_all:
            raise ConfigError(f"model.attention: {self.attention} cannot keep documents apart where windows slide")

    def check_context(self, ranks: int) -> None:
        family, heads = self.config.model_type, getattr(self.config, "num_attention_heads", None) or ranks
        if not self.takes_positions or getattr(self.lm, "_is_stateful", False) or not self._sees_all:
            raise ConfigError(
                f"run.runner.context_parallel: ranks can share sequences where every block attends to all of the past "
                f"and the model takes positions, and {family} is another; leave it out"
            )
        if self.attention == "eager":
            raise ConfigError("model.attention: eager wants whole sequences; context_parallel needs sdpa or a kernel")
        if heads % ranks:
            raise ConfigError(
                f"run.runner.context_parallel: {ranks} ranks cannot share the {heads} heads of attention evenly; "
                f"choose a divisor of {heads}"
            )

    def ends(self) -> Ends | None:
        theirs = list(self.lm.config.base_model_pp_plan or {})
        lists = {name for name, module in self.lm.base_model.named_children() if isinstance(module, nn.ModuleList)}
        blocks = [name for name in theirs if name in lists]
        if len(blocks) != 1 or self.measured is None:
            return None
        own = [f"lm.{self.lm.base_model_prefix}.{name}" for name in theirs]
        at = theirs.index(blocks[0])
        head = next(name for name, module in self.lm.named_modules() if module is self.lm.get_output_embeddings())
        return Ends(own[:at], [*own[at + 1 :], f"lm.{head}"])

    def experts(self) -> dict[str, nn.Module]:
        return {name: module for name, module in self.named_modules() if hf_internals.holds_experts(module)}

    def tensor_parallel_plan(self) -> dict[str, str]:
        """transformers' own plan, with the vocabulary sharded; empty where it has none, or other styles than ours."""
        theirs = dict(self.lm.config.base_model_tp_plan or {})
        for stack in [pattern for pattern, style in theirs.items() if style == "moe_tp_experts"]:
            theirs = {pattern: style for pattern, style in theirs.items() if not pattern.startswith(f"{stack}.")}
        if not theirs or not set(theirs.values()) <= _STYLES.keys():
            return {}
        plan = {f"{self.lm.base_model_prefix}.{pattern}": _STYLES[style] for pattern, style in theirs.items()}
        # A plan is of a family: it names layers that this configuration may not have.
        names = [self.canonical_name(name) for name, _ in (*self.named_modules(), *self.named_parameters())]
        plan = {pattern: style for pattern, style in plan.items() if any(fnmatchcase(name, pattern) for name in names)}
        words, head = self.lm.get_input_embeddings(), self.lm.get_output_embeddings()
        cut = (words,) if words.weight is head.weight and head.bias is None else (words, head)
        if self.measured is None:  # all ranks compute all logits
            return plan
        return plan | {name: "vocabulary" for name, module in self.lm.named_modules() if module in cut}

    @property
    def vocabulary_multiple(self) -> int:
        return self.options.make_vocab_size_divisible_by

    def canonical_name(self, name: str) -> str:
        return name.removeprefix("lm.")

    def logical_shape(self, name: str, shape: torch.Size) -> torch.Size:
        return torch.Size((self.vocab_size, *shape[1:])) if name in self._vocabulary else shape

    def initialize(self, name: str, value: Tensor, rng: torch.Generator) -> None:
        """Fill `value` with transformers' own initial value."""
        hf_internals.initialize(self._skeleton, name, value, rng)

    @cached_property
    def _skeleton(self) -> PreTrainedModel:
        return hf_internals.skeleton(self.lm, self.config)

    def pretrained_weights(self) -> Path | None:
        return self.source

    def pretrained_name(self, name: str, available: set[str]) -> Place:
        """The name with or without the base model's prefix: GPT-2 is published without. Experts are published apart."""
        short = name.removeprefix(f"{self.lm.base_model_prefix}.")
        return name if name in available else published_experts(name, available, self.num_experts) or short

    @property
    def num_experts(self) -> int:
        """Number of the experts of a layer, 0 in a dense model."""
        return getattr(self.config, "num_local_experts", getattr(self.config, "num_experts", 0)) or 0

    def checkpointing(self, mode: Mode) -> list[tuple[list[nn.Module], Mode]]:
        if mode == "offload" and self.routers is not None and self.routers.has_loss:
            raise ConfigError(
                "run.gradient_checkpointing: offload hides the routers from their loss; use full, or model.router_loss="
                "none"
            )
        return super().checkpointing(mode)

    @property
    def hidden_size(self) -> int:
        return self.config.hidden_size

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def max_length(self) -> int | None:
        return getattr(self.config, "max_position_embeddings", None)

    def _matrices(self, experts: bool) -> Iterator[tuple[int, float]]:
        """Elements of each module's matrices, of all or of `experts` alone, and the share of them that a token uses."""
        for module in self._skeleton.modules():  # whole under every runner
            expert = hf_internals.holds_experts(module)
            if not isinstance(module, nn.Embedding) and expert >= experts:
                share = self.config.num_experts_per_tok / module.num_experts if expert else 1.0
                yield sum(p.numel() for p in module.parameters(recurse=False) if p.ndim > 1), share

    @property
    def idle_parameters(self) -> int:
        return sum(round(elements * (1 - share)) for elements, share in self._matrices(experts=True))

    def flops_per_token(self, sequence_length: int | None) -> float | None:
        """Six operations per element of a matrix that a token uses, and attention's (Narayanan et al., 2021, 5.1)."""
        length = sequence_length or self.max_length
        layers, heads = (getattr(self.config, key, None) for key in ("num_hidden_layers", "num_attention_heads"))
        if not self._sees_all or not (length and layers and heads):
            return None
        width = heads * (getattr(self.config, "head_dim", None) or self.hidden_size // heads)
        used = sum(elements * share for elements, share in self._matrices(experts=False))
        return 6 * used + 12 * layers * width * length

    def memory_formulas(self, micro_batch: int, sequence_length: int | None) -> dict[str, int]:
        """Estimates for a GPT with blocks of 12 h^2 parameters in half precision, on one device.

        20 bytes for each: weight and gradient in fp16, and both and Adam's moments in fp32. Activations without
        checkpointing: Korthikanti et al., 2022, equation 1, which is about eager attention.
        """
        layers, heads = (getattr(self.config, key, 0) or 0 for key in ("num_hidden_layers", "num_attention_heads"))
        h, b, s = self.hidden_size, micro_batch, sequence_length or 0
        state = {"blocks of 12 l h^2 parameters at 20 bytes": 12 * layers * h**2 * 20}
        eager = "activations l (34 b s h + 5 b a s^2), eager attention, no checkpointing"
        return state | ({eager: layers * (34 * b * s * h + 5 * b * heads * s**2)} if s else {})

    def new_cache(self) -> DynamicCache | None:
        """None for a model with a cache of its own kind, such as Mamba's, whose forward then gets all tokens again."""
        model: Any = self.lm
        if self._cache_name is None or not model._supports_default_dynamic_cache():
            return None
        cache = DynamicCache(config=self.lm.config)
        # Models of linear attention alone ask a cache for the length that only attention's layers know.
        return cache if not cache.layers or any(isinstance(x, DynamicLayer) for x in cache.layers) else None

    def save_config(self, folder: Path) -> None:
        config = copy.deepcopy(self.config)
        config.architectures = [type(self.lm).__name__]
        config.dtype = next((p.dtype for p in self.lm.parameters() if p.requires_grad), config.dtype)  # as it is saved
        config.save_pretrained(folder)
        copy_files(self._generation, folder)
