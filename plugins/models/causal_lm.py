"""Any causal language model of transformers, unmodified, by its configuration or its folder."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, PreTrainedConfig

from crosstrain import transformers_plan
from crosstrain.check import OptionError
from crosstrain.errors import ConfigError
from crosstrain.model import Ends, Model
from crosstrain.pretrained import pretrained_folder
from crosstrain.registry import registry

# What some models do to logits, or to the head, that `Model.head` does not.
_UNKNOWN_TO_THE_HEAD = ("final_logit_softcapping", "logit_scale", "logits_scaling")


@registry.register_model("causal_lm")
class CausalLM(Model):
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
        super().__init__(options)
        self.source = pretrained_folder(options.pretrained) if options.pretrained else None
        self.config = _config(options, self.source)
        multiple = options.make_vocab_size_divisible_by
        padded = copy.deepcopy(self.config)
        padded.vocab_size = -(-self.config.vocab_size // multiple) * multiple
        try:
            self.lm = AutoModelForCausalLM.from_config(
                padded, attn_implementation=options.attention, dtype=torch.float32, trust_remote_code=False
            )
        except (ValueError, KeyError) as error:  # no causal model of this type, or sizes that do not go together
            reason = str(error).splitlines()[0]
            raise ConfigError(f"model.config: transformers cannot build it ({reason})") from error
        head = self.lm.get_output_embeddings()
        unknown = [key for key in _UNKNOWN_TO_THE_HEAD if getattr(padded, key, None) not in (None, 1, 1.0)]
        if unknown or not isinstance(head, nn.Linear) or head.bias is not None:
            what = unknown[0] if unknown else "a head that is more than a matrix"
            raise ConfigError(f"model: {self.config.model_type} has {what}, which causal_lm does not know")
        modules = {module: name for name, module in self.lm.named_modules()}
        ends = (self.lm.get_input_embeddings(), head)
        self._vocabulary = {f"{modules[module]}.weight" for module in ends}

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, cache: Any = None) -> Tensor:
        """input_ids [batch, length]; labels [batch, length], the target at each position or -100."""
        body = self.lm.base_model
        hidden = body(input_ids, past_key_values=cache, use_cache=cache is not None).last_hidden_state
        return self.head(hidden, self.lm.get_output_embeddings().weight, labels, self.vocab_size)

    def blocks(self) -> list[nn.Module]:
        """The longest list of modules in the model."""
        lists = [module for module in self.lm.modules() if isinstance(module, nn.ModuleList)]
        return list(max(lists, key=len))

    def ends(self) -> Ends | None:
        return transformers_plan.ends(self.lm, "lm")

    def tensor_parallel_plan(self) -> dict[str, str]:
        return transformers_plan.tensor_parallel_plan(self.lm)

    @property
    def vocabulary_multiple(self) -> int:
        return self.options.make_vocab_size_divisible_by

    def canonical_name(self, name: str) -> str:
        return name.removeprefix("lm.")

    def logical_shape(self, name: str, shape: torch.Size) -> torch.Size:
        return torch.Size((self.vocab_size, *shape[1:])) if name in self._vocabulary else shape

    def initialize(self, name: str, value: Tensor, rng: torch.Generator) -> None:
        """Matrices N(0, initializer_range) or 0.02, weights of norms 1, biases 0: what most models begin with."""
        if value.ndim >= 2:
            value.normal_(0.0, getattr(self.config, "initializer_range", None) or 0.02, generator=rng)
        else:
            value.fill_(float(name.endswith("weight")))

    def pretrained_weights(self) -> Path | None:
        return self.source

    def pretrained_name(self, name: str, available: set[str]) -> str:
        """A folder of the bare transformer names its weights without the prefix."""
        return name if name in available else name.removeprefix(f"{self.lm.base_model_prefix}.")

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def max_length(self) -> int | None:
        return getattr(self.config, "max_position_embeddings", None)

    def new_cache(self) -> DynamicCache:
        return DynamicCache(config=self.lm.config)

    def save_config(self, folder: Path) -> None:
        config = copy.deepcopy(self.config)
        config.architectures = [type(self.lm).__name__]
        config.save_pretrained(folder)


def _config(options: CausalLM.Options, source: Path | None) -> PreTrainedConfig:
    given = dict(options.config)
    if source is not None:
        return AutoConfig.from_pretrained(source, trust_remote_code=False, **given)
    try:
        return AutoConfig.for_model(given.pop("model_type"), **given)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"model.config: {str(error).splitlines()[0]}") from error
