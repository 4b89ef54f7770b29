"""transformers' causal language models, unmodified, from a configuration or a folder."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar

from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig
from transformers.configuration_utils import ALLOWED_LAYER_TYPES
from transformers.modeling_rope_utils import RopeParameters
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from crosstrain import (
    ConfigError,
    NonNegativeFloat,
    OptionError,
    Text,
    TransformersModel,
    UserError,
    build_transformers,
    did_you_mean,
    pretrained_folder,
    registry,
    sentence,
)
from crosstrain.modeling.routers import Routers, Scope

from .hugging_face.attention import Attention
from .hugging_face.base import LARGEST_SIZE, MOST_LAYERS, SIZES, Size, check_published
from .hugging_face.internals import ROPE_KEYS, keys_beside_fields, routers_of
from .hugging_face.mup import MaximalUpdate

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")  # keys for the number of experts
# PreTrainedConfig keys that training does not use.
_NOT_OF_TRAINING = {"name_or_path", "attn_implementation", "_commit_hash"}


@registry.register_model("causal_lm")
class CausalLM(TransformersModel):
    """Any model that transformers' AutoModelForCausalLM supports: Llama, GPT-Neo, OPT and many others."""

    auto: ClassVar[Any] = AutoModelForCausalLM

    @dataclass
    class Options:
        """`config` or `pretrained` selects the model."""

        families: ClassVar[Mapping[str, Any]] = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES  # supported values of model_type
        kind: ClassVar = "causal language model"
        elsewhere: ClassVar = {"from_dense": "none: give `pretrained` a folder of a model with experts"}
        former: ClassVar = {"from_dense": None}

        pretrained: Text | None = None  # Hugging Face name, folder or .gguf file; None: random initialization
        # transformers' configuration with its model_type; with `pretrained`, only the keys to change
        config: dict[str, Any] = field(default_factory=dict)
        make_vocab_size_divisible_by: Size = 128  # pad embedding rows to a multiple of this; padding is not saved
        # transformers' attention implementation; None: sdpa if the model supports it, else eager
        attention: Attention | None = None
        # set of tokens over which the balance loss of a mixture of experts is computed; sequence: each document;
        # micro_batch: a micro batch on one rank; none: no loss
        router_loss: Scope = "sequence"
        router_loss_coef: NonNegativeFloat | None = None  # weight of router_loss; None: the model's own weight, else 0
        # weight of the mean squared log-sum-exp of router logits; None: the model's own weight, else 0
        router_z_loss_coef: NonNegativeFloat | None = None
        router_bias_rate: NonNegativeFloat = 0.001  # change per step of the balancing biases of routers, if any
        # hidden size of the model for which run.init_lr was tuned (maximal update parametrization); None: not scaled
        mup_base_width: Size | None = None

        def __post_init__(self) -> None:
            if self.pretrained is None and "model_type" not in self.config:
                raise OptionError(
                    "config", "needs a transformers configuration with its model_type, unless pretrained is set"
                )
            if "model_type" in self.config:
                self.check_keys(self.config["model_type"])

        def check_keys(self, family: str) -> None:
            """Raise OptionError for keys that transformers would store, but the model would not read."""
            if str(family) not in self.families:
                hint = did_you_mean(str(family), self.families, "see transformers' documentation")
                raise OptionError("config.model_type", f"transformers has no {self.kind} {family!r}; {hint}")
            _check_keys_of(CONFIG_MAPPING[family], self.config, "config")

    def __init__(self, options: Options) -> None:
        source = pretrained_folder(options.pretrained) if options.pretrained else None
        try:
            config = _config(options, source)
            self.check_config(config)
            lm = build_transformers(self.auto, config, options.make_vocab_size_divisible_by, options.attention)
        except UserError:
            raise
        except Exception as error:  # transformers raises errors of many types
            raise ConfigError(
                f"model.config: transformers cannot build a model from it ({sentence(error)[:300]})"
            ) from error
        super().__init__(options, config, lm, source)
        self.route(options)
        if options.mup_base_width is not None:
            self.weights = MaximalUpdate(self, options.mup_base_width)

    @classmethod
    def check_config(cls, config: PreTrainedConfig) -> None:
        """Raise ConfigError for a configuration that contains several models."""
        if config.get_text_config() is not config:
            raise ConfigError(
                f"model.config.model_type: {config.model_type} contains several models; use its language model's type, "
                f"{config.get_text_config().model_type}, or arch: image_text if it reads images"
            )

    def route(self, options: Options) -> None:
        """Add balance losses and biases to the model's routers, if the model has routers."""
        given = {"router_aux_loss_coef": options.router_loss_coef, "router_z_loss_coef": options.router_z_loss_coef}
        balance, z = (getattr(self.text_config, key, 0) or 0 if own is None else own for key, own in given.items())
        if modules := routers_of(self.lm):
            scope, balance = options.router_loss, balance * (options.router_loss != "none")
            self.routers = Routers(modules, scope, balance, z, options.router_bias_rate, self.record, self.record_load)
        elif any(given.values()):
            raise ConfigError(
                f"model.router_loss_coef: {self.config.model_type} has no routers that this option can balance; if its "
                f"configuration has output_router_logits, set that to true for transformers' own loss"
            )


def _config(options: CausalLM.Options, source: Path | None) -> PreTrainedConfig:
    if source is None:
        config = AutoConfig.for_model(**options.config)
    else:
        published = AutoConfig.from_pretrained(source, trust_remote_code=False)
        options.check_keys(published.model_type)
        fixed = {key: value for key, value in options.config.items() if key in ("model_type", *SIZES)}
        check_published(published, fixed, source)
        inner = {key: options.config[key] for key in published.sub_configs if key in options.config}
        given = {key: value for key, value in options.config.items() if key not in ("model_type", *inner)}
        config = AutoConfig.from_pretrained(source, trust_remote_code=False, **given)
        for part, values in inner.items():  # from_pretrained would reset the other keys of a part
            own = getattr(config, part)
            check_published(own, {key: value for key, value in values.items() if key in ("model_type", *SIZES)}, source)
            for key, value in values.items():
                setattr(own, key, value)
    _check_values(options.config, config)
    return config


def _check_values(given: Mapping[str, Any], config: PreTrainedConfig) -> None:
    """Raise ConfigError for values that allow the model to be built, but make its forward fail."""
    named = {config.attribute_map.get(key, key) for key in given}
    for key in (*SIZES, "max_position_embeddings"):
        if config.attribute_map.get(key, key) not in named:
            continue
        size, most = _global(config, key), MOST_LAYERS if key == "num_hidden_layers" else LARGEST_SIZE
        if type(size) is int and not 1 <= size <= most:
            raise ConfigError(f"model.config.{key}: expected 1 to {most}, got {size}")
    heads, keys = (_global(config, key) for key in ("num_attention_heads", "num_key_value_heads"))
    if type(heads) is type(keys) is int and heads % keys:
        raise ConfigError(f"model.config.num_key_value_heads: {keys} does not divide num_attention_heads={heads}")
    experts = next(filter(None, (_global(config, key) for key in _EXPERTS)), None)
    chosen = _global(config, "num_experts_per_tok")
    if type(experts) is type(chosen) is int and chosen > experts:
        raise ConfigError(f"model.config.num_experts_per_tok: {chosen} is more than the {experts} experts")
    for key, value in given.items():
        if "drop" in key and isinstance(value, (int, float)) and not 0 <= value < 1:
            raise ConfigError(f"model.config.{key}: expected a number of at least 0 and below 1, got {value}")


def _global(config: PreTrainedConfig, key: str) -> Any:
    """Return a value that applies to the whole model; None if the value is missing or differs by layer."""
    try:
        return getattr(config, key, None)
    except RuntimeError:  # transformers refuses to read some per-layer values
        return None


def _check_keys_of(cls: type[PreTrainedConfig], given: Mapping[str, Any], at: str) -> None:
    known = {"model_type", *(f.name for f in fields(cls)), *cls.attribute_map, *keys_beside_fields(cls.model_type)}
    if {"num_attention_heads", "num_key_value_heads"} <= known:
        known.add("head_dim")  # attention reads head_dim in families that do not declare it
    known -= _NOT_OF_TRAINING
    for key, value in given.items():
        if key not in known:
            hint = did_you_mean(key, known, f"{cls.__name__} has {', '.join(sorted(known)[:8])} ...")
            raise OptionError(f"{at}.{key}", f"unknown key; {hint}")
        if key in cls.sub_configs and isinstance(value, Mapping) and issubclass(cls.sub_configs[key], PreTrainedConfig):
            _check_keys_of(cls.sub_configs[key], value, f"{at}.{key}")
        if key in ("rope_parameters", "rope_scaling") and isinstance(value, Mapping):
            _check_rope(value, f"{at}.{key}")


def _check_rope(given: Mapping[str, Any], at: str) -> None:
    """Check a mapping of rotary parameters, or one mapping per layer type."""
    known = {*RopeParameters.__annotations__, "type", *ROPE_KEYS}
    for key, value in given.items():
        if key in ALLOWED_LAYER_TYPES and isinstance(value, Mapping):
            _check_rope(value, f"{at}.{key}")
        elif key not in known:
            raise OptionError(f"{at}.{key}", "unknown key; " + did_you_mean(key, known))
