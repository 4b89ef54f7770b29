"""Resolve a sharding plan (name pattern -> style) to shard specs.

A shard spec describes the position of each rank's slice in a parameter.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from torch.distributed.tensor import Placement, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from transformers.pytorch_utils import Conv1D

from crosstrain import Box, ConfigError, Ends, Model, Piece
from crosstrain.modeling.base import no_match

from .float8 import in_float8

CUT_STYLES = {
    "column": "its output features",
    "fused_qkv": "the output features of each of its three parts",
    "row": "its input features",
    "vocabulary": "its rows, one for each token",
    "experts": "the features between an expert's matrices",
}
_HEADS = re.compile("(num|n)_((attention|kv|key_value)_)?heads?")
STYLES = (*CUT_STYLES, "replicated", "summed", "divide")


@dataclass(frozen=True)
class ShardSpec:
    """A parameter of shape `full`, sharded along `dim` over `size` ranks.

    With several `parts`, such as queries, keys and values in one matrix, each part is sharded separately, and a rank
    holds the concatenation of its slices of all parts.
    """

    full: tuple[int, ...]
    dim: int
    size: int
    parts: int = 1

    def __post_init__(self) -> None:
        assert self.full[self.dim] % (self.size * self.parts) == 0, self

    @property
    def local(self) -> tuple[int, ...]:
        """Return the shape of a rank's slice."""
        return tuple(n // self.size if d == self.dim else n for d, n in enumerate(self.full))

    @property
    def placement(self) -> Placement:
        return Shard(self.dim) if self.parts == 1 else _StridedShard(self.dim, split_factor=self.parts)

    def whole(self, pieces: list[Piece], rank: int) -> list[Piece]:
        """Convert pieces of the slice of `rank` to pieces of the full parameter."""
        width = self.full[self.dim] // (self.size * self.parts)  # rows or columns of a rank's slice of one part
        out = []
        for piece in pieces:
            first, count = piece.box.offset[self.dim], piece.box.shape[self.dim]
            for part in range(self.parts):
                low, high = max(first, part * width), min(first + count, (part + 1) * width)
                if low < high:
                    offset, shape = list(piece.box.offset), list(piece.box.shape)
                    offset[self.dim] = (part * self.size + rank) * width + low - part * width
                    shape[self.dim] = high - low
                    data = piece.data.narrow(self.dim, low - first, high - low)
                    out.append(Piece(Box(tuple(offset), tuple(shape)), data))
        return out


@dataclass
class Resolved:
    """A plan resolved for one model, with the names of its modules and parameters."""

    modules: dict[str, str] = field(default_factory=dict)  # module with sharded weights -> style
    # replicated parameters; each rank computes a partial gradient
    summed: set[str] = field(default_factory=set)
    attributes: set[tuple[str, str]] = field(default_factory=set)  # (module, attribute) of sizes to divide by the ranks


def resolve(model: Model, over: dict[str, str]) -> Resolved:
    """Match the patterns of the model's own plan, and then of `over`, with the model's names. Later patterns win.

    Raises ConfigError for an unknown style, a pattern without a match, a module that the style does not support, and a
    number of heads that the plan does not divide.
    """
    plan = model.structure.tensor_parallel_plan() | over
    own = {model.weights.canonical_name(name): name for name, _ in model.named_parameters()}
    resolved, users = Resolved(), dict[str, None]()  # users: modules that use the modules sharded by `over`
    for pattern, style in plan.items():
        if style not in STYLES:
            raise ConfigError(f"run.runner.plan: {pattern}: unknown style {style!r}; known: {', '.join(STYLES)}")
        if style == "divide":
            found = list(_attributes(model, pattern))
            resolved.attributes.update(found)
        else:
            found = [own[name] for name in own if fnmatchcase(name, pattern) or fnmatchcase(_owner(name), pattern)]
            for name in found:
                resolved.modules.pop(_owner(name), None)
                resolved.summed.discard(name)
                if style == "summed":
                    resolved.summed.add(name)
                elif style != "replicated" and (pattern in over or not _stays_whole(model, name, style)):
                    _check_module(model, name, style)
                    resolved.modules[_owner(name)] = style
                    users |= {user_of(model, _owner(name)): None} if pattern in over else {}
        if not found:
            raise ConfigError(f"run.runner.plan: {no_match(pattern, own)}")
    for user in users:
        _check_heads(model, user, resolved)
    return resolved


def shard_specs(model: Model, plan: Resolved, size: int) -> dict[tuple[str, str], ShardSpec]:
    """Return (module, attribute) -> shard spec for `size` ranks; all other parameters are replicated.

    Reads only names and shapes. Raises ConfigError if the plan shards nothing, or if a sharded size is not divisible by
    `size`: the error names the first such parameter and lists the values of `size` that the model allows.
    """
    if not plan.modules:
        family = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
        raise ConfigError(
            f"run.runner.tensor_parallel: {family} has no plan for sharding its parameters; write one under "
            f"run.runner.plan (see Plans in docs/megatron.md)"
        )
    cuts: dict[tuple[str, str], ShardSpec] = {}
    common, problem = 0, ""  # greatest common divisor of all sharded sizes
    for module_name, attribute in sorted(plan.attributes):
        value = getattr(model.get_submodule(module_name), attribute)
        common = math.gcd(common, value)
        if value % size:
            problem = problem or (
                f"{model.weights.canonical_name(module_name)}.{attribute}, which is {value}, cannot be divided by "
                f"{size} ranks"
            )
    for module_name, style in plan.modules.items():
        owner = model.get_submodule(module_name)
        for attribute, parameter in owner.named_parameters(recurse=False):
            shape = list(parameter.shape)
            if style == "vocabulary":
                shape[0] = _padded_rows(model, parameter, size)
                cuts[module_name, attribute] = ShardSpec(tuple(shape), 0, size)
                continue
            if attribute == "bias" and style == "row":
                continue
            if style == "experts":  # [experts, out, in], or transposed
                dim = 1 + (attribute.startswith("down") != owner.is_transposed)
                parts = 2 if attribute.startswith("gate_up") else 1
            else:
                # Conv1D weights are [in, out].
                dim = int((style == "row") != isinstance(owner, Conv1D)) if attribute != "bias" else 0
                parts = 3 if style == "fused_qkv" else 1
            # An attention head must not be split across ranks.
            unit = getattr(model.get_submodule(user_of(model, module_name)), "head_dim", 1)
            units, rest = divmod(shape[dim], parts * unit)
            common = math.gcd(common, 1 if rest else units)
            if rest or units % size:
                problem = problem or (
                    f"{model.weights.canonical_name(f'{module_name}.{attribute}')} of shape {shape} cannot be cut "
                    f"{style}-wise for {size} ranks, because {CUT_STYLES[style]} are {units} x {unit}"
                )
            elif not problem:
                cuts[module_name, attribute] = ShardSpec(tuple(shape), dim, size, parts)
    if problem:
        degrees = ", ".join(str(d) for d in range(1, common + 1) if common % d == 0)
        raise ConfigError(f"run.runner.tensor_parallel: {problem}; the model allows {degrees}")
    return cuts


def _check_heads(model: Model, user: str, plan: Resolved) -> None:
    """Raise ConfigError if a module keeps an undivided number of heads, because the results could be wrong."""
    for attribute, value in vars(model.get_submodule(user)).items():
        is_number = type(value) is int and value > 1 and _HEADS.fullmatch(attribute)
        if is_number and (user, attribute) not in plan.attributes:
            pattern = re.sub(r"\.\d+\.", ".*.", f"{model.weights.canonical_name(user)}.{attribute}")
            raise ConfigError(
                f"run.runner.plan: {model.weights.canonical_name(user)}.{attribute} is {value}, but each rank has only "
                f"a part of the heads; add {pattern}: divide"
            )


def ends_of(model: Model, key: str) -> Ends:
    """Return the modules before and after the model's blocks.

    Raises ConfigError, with the option `key` in its message, if the model does not define these modules.
    """
    ends = model.structure.ends()
    if ends is None:
        raise ConfigError(
            f"run.runner.{key}: {type(model).__name__} does not define what runs before and after its blocks, or its "
            f"head is more than a matrix product; leave {key} out"
        )
    return ends


def user_of(model: Model, name: str) -> str:
    """Return the name of the module that uses a linear layer; peft adapters and module containers are skipped."""
    while name := _owner(name):
        module = model.get_submodule(name)
        if not hasattr(module, "base_layer") and not isinstance(module, (nn.ModuleDict, nn.ModuleList)):
            break
    return name


def _padded_rows(model: Model, parameter: nn.Parameter, ranks: int) -> int:
    """Return the number of vocabulary rows, padded to a multiple of `vocabulary_multiple * ranks`."""
    name = next(name for name, p in model.named_parameters() if p is parameter)
    weights, multiple = model.weights, model.weights.vocabulary_multiple * ranks
    return -(-weights.logical_shape(weights.canonical_name(name), parameter.shape)[0] // multiple) * multiple


def _stays_whole(model: Model, name: str, style: str) -> bool:
    """Return True for an embedding with its own forward, such as Gemma's; the model's plan does not shard it."""
    return (
        style == "vocabulary"
        and isinstance(module := model.get_submodule(_owner(name)), nn.Embedding)
        and type(module).forward != nn.Embedding.forward
    )


def _check_module(model: Model, name: str, style: str) -> None:
    module: Any = model.get_submodule(_owner(name))
    if style == "experts":
        if module not in model.structure.experts().values() or module.has_bias or not module.is_concatenated:
            raise ConfigError(
                f"run.runner.plan: {model.weights.canonical_name(name)} belongs to a {type(module).__name__}, but the "
                f"style experts is for stacked experts without biases and with concatenated gate and up projections"
            )
        return
    known = (nn.Embedding, nn.Linear) if style == "vocabulary" else (nn.Linear, Conv1D)
    if type(module).forward not in [kind.forward for kind in known] and not in_float8(module):
        kinds = " and ".join(f"torch's {kind.__name__}" if kind is not Conv1D else "Conv1D" for kind in known)
        raise ConfigError(
            f"run.runner.plan: {model.weights.canonical_name(name)} belongs to a {type(module).__name__}, but the "
            f"style {style} is for {kinds}"
        )


def _attributes(model: Model, pattern: str) -> Iterator[tuple[str, str]]:
    """Yield (module, attribute) of the integer attributes that match a pattern of canonical names."""
    path, _, attribute = pattern.rpartition(".")
    for own, module in model.named_modules():
        value = vars(module).get(attribute)
        if type(value) is int and fnmatchcase(model.weights.canonical_name(own), path):
            yield own, attribute


def _owner(name: str) -> str:
    return name.rpartition(".")[0]
