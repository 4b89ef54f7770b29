"""Low-rank adapters on a language model, under the names that peft saves."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Iterable

import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn

from crosstrain import ConfigError

from .options import Lora

_ADAPTER = "default"


def add_adapters(model: nn.Module, options: Lora, trained: bool) -> None:
    """Add adapters to the named linear maps; with `trained` the other parameters are trained too.

    Raises ConfigError for a name that matches no linear map.
    """
    config = LoraConfig(
        r=options.rank, lora_alpha=options.alpha, lora_dropout=options.dropout, target_modules=options.targets
    )
    try:
        inject_adapter_in_model(config, model, adapter_name=_ADAPTER)
    except ValueError as error:  # peft's sentence names what it looked for
        raise ConfigError(f"model.language_model.lora.targets: {error}") from error
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trained or is_adapter(name))


def is_adapter(name: str) -> bool:
    """True for the name of an adapter's parameter."""
    return ".lora_A." in name or ".lora_B." in name


def canonical(name: str) -> str:
    """A parameter's name without peft's additions."""
    return name.replace(".base_layer.", ".").replace(f".{_ADAPTER}.weight", ".weight")


def tensor_parallel_plan(plan: dict[str, str], names: Iterable[str]) -> dict[str, str]:
    """Styles of adapters on linear maps that `plan` shards; `names` are canonical.

    B is sharded like a map's output features, A like its input features.
    """
    modules = {name.rpartition(".")[0] for name in names}
    sides = {"column": "lora_B", "fused_qkv": "lora_B", "row": "lora_A"}
    patterns = {f"{key}.{sides[style]}": style for key, style in plan.items() if style in sides}
    return {key: style for key, style in patterns.items() if fnmatch.filter(modules, key)}


def initialize(name: str, value: Tensor, rng: torch.Generator) -> None:
    """peft's initial values: A as torch's linear map, B zero, so that the adapter changes nothing at first."""
    if ".lora_B." in name:
        value.zero_()
    else:
        bound = 1 / math.sqrt(value.shape[1])  # kaiming_uniform_ with a = sqrt(5)
        value.uniform_(-bound, bound, generator=rng)


def merged(weight: Tensor, a: Tensor, b: Tensor, *, options: Lora, transposed: bool) -> Tensor:
    """Merge an adapter, a [rank, in] and b [out, rank], into a linear map's weight [out, in], or `transposed`."""
    change = (b @ a) * (options.alpha / options.rank)
    return weight + (change.T if transposed else change)
