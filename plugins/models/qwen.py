"""Qwen2, Qwen2.5 and Qwen3: transformers' causal language models, unmodified."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from torch import nn
from transformers import PreTrainedConfig, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from crosstrain import (
    ConfigError,
    OptionError,
    PositiveFloat,
    Text,
    TransformersModel,
    build_transformers,
    pretrained_folder,
    registry,
)

from .hugging_face.attention import Attention
from .hugging_face.base import SIZES, DropRate, Layers, Size, check_published

_FAMILIES: dict[str, tuple[type[PreTrainedConfig], type[nn.Module]]] = {
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}
_SIZES = (*SIZES, "max_position_embeddings", "initializer_range")


@registry.register_model("qwen")
class Qwen(TransformersModel):
    """Decoder-only language model with grouped-query attention, RoPE and gated MLPs (Qwen team, 2024, 2025)."""

    @dataclass
    class Options:
        """Sizes that are None come from the pretrained model, or else from transformers' defaults for the family."""

        published: ClassVar = ("family", *_SIZES, "rope_theta")

        pretrained: Text | None = None  # Hugging Face name, folder or .gguf file; sets the family; None: random weights
        family: Literal["qwen2", "qwen3"] = "qwen2"  # qwen2 includes Qwen2.5; qwen3 normalizes queries and keys
        vocab_size: Size | None = None  # number of token IDs
        hidden_size: Size | None = None  # width of the residual stream
        intermediate_size: Size | None = None  # MLP width
        num_hidden_layers: Layers | None = None  # number of blocks
        num_attention_heads: Size | None = None  # query heads per block
        num_key_value_heads: Size | None = None  # key/value heads per block; each serves a group of query heads
        head_dim: Size | None = None  # size of a head, qwen3 only; qwen2: hidden_size / num_attention_heads
        max_position_embeddings: Size | None = None  # longest sequence in tokens
        rope_theta: PositiveFloat | None = None  # base of the rotary frequencies
        tie_word_embeddings: bool | None = None  # share the embedding's weight with the head
        initializer_range: PositiveFloat | None = None  # standard deviation of initial weights
        attention_dropout: DropRate = 0.0  # dropout rate of attention weights
        make_vocab_size_divisible_by: Size = 128  # pad embedding rows to a multiple of this; padding is not saved
        attention: Attention = "sdpa"  # transformers' attention implementation

        def __post_init__(self) -> None:
            if self.head_dim is not None and self.head_dim % 2:
                raise OptionError("head_dim", f"expected an even number for rotary positions, got {self.head_dim}")
            if self.head_dim is not None and self.family == "qwen2" and self.pretrained is None:
                raise OptionError(
                    "head_dim", "qwen2 does not have this option: its head_dim is hidden_size / num_attention_heads"
                )

    def __init__(self, options: Options) -> None:
        source = pretrained_folder(options.pretrained) if options.pretrained else None
        config = _config(options, source)
        kind = _FAMILIES[config.model_type][1]
        lm = build_transformers(kind, config, options.make_vocab_size_divisible_by, options.attention)
        super().__init__(options, config, lm, source)


def _config(options: Qwen.Options, source: Path | None) -> PreTrainedConfig:
    """Return transformers' configuration with the options' sizes. Raises ConfigError if the sizes are inconsistent."""
    given = {key: getattr(options, key) for key in _SIZES if getattr(options, key) is not None}
    given["attention_dropout"] = options.attention_dropout
    family = options.family
    if source is not None:
        family = PreTrainedConfig.get_config_dict(source)[0].get("model_type", "")
        if family not in _FAMILIES:
            raise ConfigError(f"model.pretrained: {source} is of type {family!r}; known: {', '.join(_FAMILIES)}")
    make = _FAMILIES[family][0]
    if source is not None:
        check_published(make.from_pretrained(source), {k: size for k, size in given.items() if k in SIZES}, source)
    config = make.from_pretrained(source, **given) if source else make(**given)
    if options.rope_theta is not None:
        config.rope_parameters = {**config.rope_parameters, "rope_theta": options.rope_theta}
    heads, keys = config.num_attention_heads, config.num_key_value_heads
    if heads % keys:
        raise ConfigError(f"model.num_key_value_heads: {keys} does not divide num_attention_heads={heads} evenly")
    if family == "qwen2" and config.hidden_size % heads:
        raise ConfigError(f"model.num_attention_heads: {heads} does not divide hidden_size={config.hidden_size} evenly")
    if family == "qwen2" and config.hidden_size // heads % 2:
        raise ConfigError(
            f"model.num_attention_heads: rotary positions need an even head width, but {heads} heads have width "
            f"{config.hidden_size // heads}"
        )
    return config
