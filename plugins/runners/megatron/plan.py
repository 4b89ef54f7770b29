"""From a plan, patterns of names with styles, to how each parameter of a model is cut."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from torch import nn
from transformers.pytorch_utils import Conv1D

from crosstrain.errors import ConfigError
from crosstrain.model import Model

from .layout import Cut

CUT_STYLES = {
    "column": "its output features",
    "fused_qkv": "the output features of each of its three parts",
    "row": "its input features",
    "vocabulary": "its rows, one for each token",
}
STYLES = (*CUT_STYLES, "replicated", "summed", "divide")


@dataclass
class Resolved:
    """What a plan means for one model; all names are the model's own."""

    modules: dict[str, str] = field(default_factory=dict)  # with a cut weight -> style
    summed: set[str] = field(default_factory=set)  # replicated parameters of which each rank sees a part of the use
    attributes: set[tuple[str, str]] = field(default_factory=set)  # module and attribute: a size that is divided


def resolve(model: Model, plan: dict[str, str]) -> Resolved:
    """Match `plan` with the model. Later patterns win. Raises ConfigError for a pattern or style that fits nothing."""
    own = {model.canonical_name(name): name for name, _ in model.named_parameters()}
    resolved = Resolved()
    for pattern, style in plan.items():
        if style not in STYLES:
            raise ConfigError(f"run.runner.plan: {pattern}: {style!r} is no style; known: {', '.join(STYLES)}")
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
                elif style != "replicated":
                    _check_module(model, name, style)
                    resolved.modules[_owner(name)] = style
        if not found:
            example = next(iter(own))
            raise ConfigError(f"run.runner.plan: {pattern!r} matches no parameter; names are like {example}")
    return resolved


def cut_of(model: Model, module: str, attribute: str, style: str, size: int) -> Cut | None:
    """How a parameter of a module with this style is cut for `size` ranks; None: every rank holds all of it.

    Raises ConfigError where it does not divide.
    """
    owner = model.get_submodule(module)
    parameter = owner.get_parameter(attribute)
    shape = tuple(parameter.shape)
    if style == "vocabulary":
        return Cut(shape, 0, size)
    if attribute == "bias":
        if style == "row":
            return None
        dim = 0
    else:
        transposed = isinstance(owner, Conv1D)  # whose weight is [in, out]
        dim = int((style == "row") != transposed)
    parts = 3 if style == "fused_qkv" else 1
    # An attention head must stay on one rank.
    unit = getattr(model.get_submodule(_owner(module)), "head_dim", 1)
    units, rest = divmod(shape[dim], parts * unit)
    if rest or units % size:
        name = model.canonical_name(f"{module}.{attribute}")
        degrees = [d for d in range(1, units + 1) if units % d == 0] if not rest else [1]
        raise ConfigError(
            f"run.runner.tensor_parallel: {name} of shape {list(shape)} cannot be cut {style}-wise for {size} ranks, "
            f"because {CUT_STYLES[style]} are {units} x {unit}; it allows {', '.join(map(str, degrees))}"
        )
    return Cut(shape, dim, size, parts)


def _check_module(model: Model, name: str, style: str) -> None:
    module = model.get_submodule(_owner(name))
    known = (nn.Embedding, nn.Linear) if style == "vocabulary" else (nn.Linear, Conv1D)
    if type(module).forward not in [kind.forward for kind in known]:
        kinds = " and ".join(f"torch's {kind.__name__}" if kind is not Conv1D else "Conv1D" for kind in known)
        raise ConfigError(
            f"run.runner.plan: {model.canonical_name(name)} belongs to a {type(module).__name__}, and the style "
            f"{style} is for {kinds}"
        )


def _attributes(model: Model, pattern: str) -> Iterator[tuple[str, str]]:
    """Whole-number attributes of modules whose canonical name matches."""
    path, _, attribute = pattern.rpartition(".")
    for own, module in model.named_modules():
        value = vars(module).get(attribute)
        if type(value) is int and fnmatchcase(model.canonical_name(own), path):
            yield own, attribute


def _owner(name: str) -> str:
    return name.rpartition(".")[0]
