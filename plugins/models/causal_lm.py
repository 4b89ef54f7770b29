"""Any causal language model of transformers, unmodified, by its configuration or its folder."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from crosstrain.check import OptionError
from crosstrain.errors import ConfigError, first_line
from crosstrain.pretrained import pretrained_folder
from crosstrain.registry import registry
from crosstrain.transformers_model import TransformersModel, padded

# What some models do to logits, or to the head, that `Model.head` does not.
_UNKNOWN_TO_THE_HEAD = ("final_logit_softcapping", "logit_scale", "logits_scaling")


@registry.register_model("causal_lm")
class CausalLM(TransformersModel):
    """Whatever transformers' AutoModelForCausalLM knows: Llama, GPT-Neo, OPT and many more."""

    @dataclass
    class Options:
        """Either `config` or `pretrained` says which model it is."""

        pretrained: str | None = None  # a Hugging Face name or folder to start from
        config: dict[str, Any] = field(default_factory=dict)  # of transformers, with model_type; or what differs
        make_vocab_size_divisible_by: int = 128  # embedding rows are padded to this; the padding shows nowhere
        attention: Literal["sdpa", "eager"] = "eager"  # transformers' attention implementation; not all have sdpa

        def __post_init__(self) -> None:
            if self.pretrained is None and "model_type" not in self.config:
                raise OptionError("config", "give transformers' configuration with its model_type, or pretrained")

    def __init__(self, options: Options) -> None:
        source = pretrained_folder(options.pretrained) if options.pretrained else None
        config = _config(options, source)
        try:
            lm = AutoModelForCausalLM.from_config(
                padded(config, options.make_vocab_size_divisible_by), attn_implementation=options.attention,
                dtype=torch.float32, trust_remote_code=False,
            )  # fmt: skip
        except (ValueError, KeyError) as error:  # no causal model of this type, or sizes that do not go together
            reason = first_line(error)
            raise ConfigError(f"model.config: transformers cannot build it ({reason})") from error
        head = lm.get_output_embeddings()
        unknown = [key for key in _UNKNOWN_TO_THE_HEAD if getattr(config, key, None) not in (None, 1, 1.0)]
        if unknown or not isinstance(head, nn.Linear) or head.bias is not None:
            what = unknown[0] if unknown else "a head that is more than a matrix"
            raise ConfigError(f"model: {config.model_type} has {what}, which causal_lm does not know")
        super().__init__(options, config, lm, source)

    def blocks(self) -> list[nn.Module]:
        """The longest list of modules in the model."""
        lists = [module for module in self.lm.modules() if isinstance(module, nn.ModuleList)]
        return list(max(lists, key=len))

    def initialize(self, name: str, value: Tensor, rng: torch.Generator) -> None:
        """Matrices N(0, initializer_range) or 0.02, weights of norms 1, biases 0: what most models begin with."""
        if value.ndim >= 2:
            value.normal_(0.0, getattr(self.config, "initializer_range", None) or 0.02, generator=rng)
        else:
            value.fill_(float(name.endswith("weight")))


def _config(options: CausalLM.Options, source: Path | None) -> PreTrainedConfig:
    given = dict(options.config)
    if source is not None:
        return AutoConfig.from_pretrained(source, trust_remote_code=False, **given)
    try:
        return AutoConfig.for_model(given.pop("model_type"), **given)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"model.config: {first_line(error)}") from error
