"""All code that uses private APIs of transformers (checked with 5.24; needs at least 5.15).

- This module uses `_attn_implementation` of a configuration, `_no_split_modules`, and `initialize_weights`, which
  constructors call.
- `configs/transformers_families.yaml` lists the attributes for the scale and softcap of the logits. Models without an
  entry compute the full logits.
- Initial values are defined only in `_init_weights`, so this module runs that method.
- `_can_record_outputs` names the class of the routers.
- Expert modules are marked by the decorator `use_experts_implementation`.
"""

import copy
from typing import Any
from unittest.mock import patch

import torch
import yaml
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from crosstrain import ConfigError, parameters_on_meta
from crosstrain.utils import paths

from .attention import Attention, choose_attention

_TABLE = yaml.safe_load((paths.home() / "configs" / "transformers_families.yaml").read_text(encoding="utf-8"))
SOFTCAPS = {family: attribute for attribute, families in _TABLE["softcaps"].items() for family in families}
SCALES = {  # family -> (attribute, exponent)
    family: (attribute, exponent)
    for kind, exponent in (("multiplied", 1), ("divided", -1))
    for attribute, families in _TABLE[kind].items()
    for family in families
}
PRODUCTS = {*_TABLE["plain"], *SCALES, *SOFTCAPS}
PREFIX_MODELS, POSITIONS_FROM_ONE = set(_TABLE["prefix_models"]), set(_TABLE["positions_from_one"])
ROPE_KEYS = set(_TABLE["rope_keys"])
NOT_CAUSAL, COMPARE_NAMES = set(_TABLE["not_causal"]), set(_TABLE["compare_names"])
WITHOUT_DOCUMENTS, DENSE_MASKS = set(_TABLE["without_documents"]), set(_TABLE["dense_masks"])


def keys_beside_fields(family: str) -> set[str]:
    """Return the keys that a family's configuration reads in addition to its fields."""
    return {*_TABLE["read_by_all"], *_TABLE["older_keys"].get(family, ())}


def build_transformers(
    auto: Any, config: PreTrainedConfig, multiple: int = 1, attention: Attention | None = None
) -> PreTrainedModel:
    """Build a model without initial values; `auto` is a model class or an Auto class of transformers.

    The vocabulary is padded to a multiple of `multiple`.
    """
    kind = auto if isinstance(auto, type) and issubclass(auto, PreTrainedModel) else auto._model_mapping[type(config)]
    config = copy.deepcopy(config)
    text = config.get_text_config()
    text.vocab_size = -(-text.vocab_size // multiple) * multiple
    chosen = choose_attention(attention, kind, config)
    # Training needs neither the hidden states of every block nor the attention weights.
    config.update({"return_dict": True, "output_hidden_states": False, "output_attentions": False})
    # Constructors skip initial values, because a rank may lack the padding row to fill; weights are still tied.
    with patch.object(PreTrainedModel, "initialize_weights", lambda self: None):
        return kind._from_config(config, attn_implementation=chosen, dtype=torch.float32)


def plans_of(decoder: PreTrainedModel) -> tuple[dict[str, str], list[str]]:
    """Return the plan for tensor parallelism, {} if there is none, and the names of the modules in a pipeline's order.

    The names are relative to the decoder: the language model without its head.
    """
    config: Any = decoder.config
    if (other := _TABLE["plans_of"].get(config.model_type)) is not None:
        config = CONFIG_MAPPING[other]
    return dict(config.base_model_tp_plan or {}), list(config.base_model_pp_plan or {})


def routers_of(lm: PreTrainedModel) -> list[nn.Module]:
    """Return the routers of a mixture of experts; each router returns logits, weights and choices."""
    recorders = getattr(lm, "_can_record_outputs", None) or getattr(lm.get_decoder(), "_can_record_outputs", None)
    recorder: Any = recorders.get("router_logits") if isinstance(recorders, dict) else None
    kind = getattr(recorder, "target_class", None)
    return [] if kind is None or recorder.index != 0 else [m for m in lm.modules() if isinstance(m, kind)]


def head_product(lm: PreTrainedModel) -> tuple[float, float | None] | None:
    """Return the scale and softcap of the logits, as in `Logits`; None: logits come from the model's own forward.

    Raises ConfigError for a model that does not predict the next token.
    """
    config, family = lm.config, lm.config.model_type
    decodes = getattr(config, "is_decoder", None)
    causal = {getattr(module, "is_causal", None) for module in lm.modules()}
    sees_all = False in causal and True not in causal  # causal models may also attend to images non-causally
    if family in NOT_CAUSAL or (decodes is False and (sees_all or family not in PRODUCTS)):
        raise ConfigError(
            f"model: {family} does not predict the next token from the tokens before it; only causal models can be "
            f"trained{', such as this one with config.is_decoder: true' if decodes is False else ''}"
        )
    other = type(lm.get_output_embeddings()) is not nn.Linear or lm.base_model is lm
    # With `output_router_logits`, the model's own forward adds a router loss.
    if family not in PRODUCTS or other or getattr(config, "output_router_logits", False):
        return None
    attribute, exponent = SCALES.get(family, ("", 1))
    text = config.get_text_config()
    scale = getattr(text, attribute, None)
    return 1.0 if scale is None else float(scale) ** exponent, getattr(text, SOFTCAPS.get(family, ""), None)


def block_lists(lm: PreTrainedModel) -> list[nn.ModuleList]:
    """Find the lists of blocks from the pipeline plan, `_no_split_modules` or the number of layers.

    A model of images and text has several lists; all other models have one.
    """
    lists = {name: module for name, module in lm.named_modules() if isinstance(module, nn.ModuleList) and len(module)}
    prefix = "" if lm.base_model is lm else f"{lm.base_model_prefix}."
    planned = [lists[at] for name in lm.config.base_model_pp_plan or {} if (at := f"{prefix}{name}") in lists]
    whole = {str(name) for name in lm._no_split_modules or ()}
    kept = [blocks for blocks in lists.values() if any(type(block).__name__ in whole for block in blocks)]
    if len(kept) > 1 and lm.config.get_text_config() is not lm.config:  # a model of images and text
        return kept
    counted = [blocks for blocks in lists.values() if len(blocks) == getattr(lm.config, "num_hidden_layers", None)]
    return [*planned, *kept, *counted][:1]


def holds_experts(module: nn.Module) -> bool:
    """Return True for a module that stacks the parameters of all experts."""
    return all(hasattr(module, mark) for mark in ("is_transposed", "is_concatenated", "has_bias", "num_experts"))


def skeleton(lm: PreTrainedModel, config: PreTrainedConfig) -> PreTrainedModel:
    """Build a model like `lm` for `initialize`.

    Vectors have the values that constructors give them; matrices are on the meta device.
    """
    with torch.random.fork_rng(devices=[]), parameters_on_meta(but=lambda p: p.numel() == max(p.shape, default=1)):
        torch.manual_seed(0)
        return type(lm)(copy.deepcopy(config))


def initialize(skeleton: PreTrainedModel, name: str, value: Tensor, rng: torch.Generator) -> None:
    """Fill `value` with transformers' initial value for the parameter `name` of a model like `skeleton`.

    Runs the initialization rules of the parameter's module and of its parent modules, with random numbers from `rng`.
    Elements that no rule fills keep the constructor's value; in a matrix, they are drawn from N(0, initializer_range).
    """
    # A tied parameter gets the initial value of its source, even if a family lists the head first.
    *path, attribute = skeleton.all_tied_weights_keys.get(name, name).split(".")
    around = [skeleton.get_submodule(".".join(path[:n])) for n in range(len(path) + 1)]
    owner, rules, rule = around[-1], [], skeleton._init_weights
    for module in around:
        rule = module._init_weights if isinstance(module, PreTrainedModel) else rule
        rules.append((rule, module))
    kept = owner.get_parameter(attribute)
    filled = nn.Parameter(value.fill_(torch.nan), requires_grad=False)
    with patch.dict(owner._parameters, {attribute: filled}), torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.set_rng_state(rng.get_state())
        for rule, module in reversed(rules):
            rule(module)
    if (left := value.isnan()).any():
        std = getattr(skeleton.config, "initializer_range", None) or 0.02
        begun = torch.empty_like(value).normal_(0.0, std, generator=rng) if kept.is_meta else kept.detach()
        value.copy_(torch.where(left, begun, value))
