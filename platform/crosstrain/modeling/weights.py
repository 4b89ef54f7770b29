"""A model's weights: names, shapes, initial values, folders of pretrained weights, and export."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol
from unittest.mock import patch

import torch
from torch import Tensor, nn

from crosstrain.utils.errors import ConfigError
from crosstrain.utils.files import write_json

if TYPE_CHECKING:
    from crosstrain.modeling.base import Model


ReadParameter = Callable[[str], Tensor]  # canonical name of a parameter -> its full value

# ---- places of parameters in pretrained folders


@dataclass(frozen=True)
class Excerpt:
    """A parameter that is a slice of a pretrained tensor.

    first: the slice's first row in that tensor. rows: number of rows of the whole tensor.
    """

    name: str
    first: int
    rows: int


@dataclass(frozen=True)
class Stack:
    """A parameter [n, rows, ...] that is a stack of pretrained tensors.

    names: for each of the n entries, the names of the tensors that are concatenated along the rows. All these tensors
    have the same number of rows.
    """

    names: tuple[tuple[str, ...], ...]


Place = str | Excerpt | Stack


def names_at(place: Place) -> set[str]:
    """Return the names of the pretrained tensors that a place refers to."""
    if isinstance(place, Stack):
        return {name for parts in place.names for name in parts}
    return {place if isinstance(place, str) else place.name}


@dataclass(frozen=True)
class Source:
    """A folder of pretrained safetensors weights for some of a model's parameters. Parameter names are canonical."""

    folder: Path
    place: Callable[[str, set[str]], Place]  # (parameter, names in the folder) -> place of the parameter
    covers: Callable[[str], bool] = lambda name: True
    of_model: bool = False  # True: an earlier run's weights; the model must use all of them, and checkpoints store them


# ---- the parts of a model that describe its weights


class Quantized(Protocol):
    """A frozen quantized parameter."""

    shape: torch.Size  # logical shape

    def quantize(self, value: Tensor) -> None:
        """Quantize the full fp32 `value` into this parameter. Called once, after the runner has sharded the model."""


class Weights:
    """Names and values of a model's parameters. By default, the torch module determines both.

    *Canonical* names and *logical* shapes are the names and shapes of the weights in Hugging Face models. Checkpoints
    store weights under these names and in these shapes.
    """

    vocabulary_multiple = 1  # each rank pads its number of embedding and head rows to a multiple of this

    def __init__(self, model: "Model") -> None:
        self.model = model

    def canonical_name(self, name: str) -> str:
        """Convert a name of `named_parameters` to the Hugging Face name."""
        return name

    def logical_shape(self, name: str, shape: torch.Size) -> torch.Size:
        """Convert the padded `shape` of parameter `name` (canonical) to the shape without padding."""
        return shape

    def quantized(self) -> Mapping[str, Quantized]:
        """Canonical name -> quantized parameter, loaded from pretrained weights; empty by default."""
        return {}

    def initialize(self, name: str, value: Tensor, rng: torch.Generator) -> None:
        """Fill `value` (fp32, CPU, logical shape) with the initial value of parameter `name` (canonical).

        The default calls `reset_parameters` of the parameter's module. Implementations draw only from `rng`, so that
        the value depends only on (seed, name, shape).
        """
        own = next(own for own, _ in self.model.named_parameters() if self.model.weights.canonical_name(own) == name)
        path, _, attribute = own.rpartition(".")
        owner: Any = self.model.get_submodule(path)
        if not hasattr(owner, "reset_parameters"):
            raise ConfigError(
                f"model: {type(owner).__name__} has no reset_parameters to initialize {name}; give the model a "
                f"crosstrain.Weights that implements initialize"
            )
        made = {key: p if p is None else nn.Parameter(p.detach().to("meta")) for key, p in owner._parameters.items()}
        made[attribute] = nn.Parameter(value, requires_grad=False)
        with patch.dict(owner._parameters, made), torch.random.fork_rng(devices=[]):
            torch.set_rng_state(rng.get_state())
            owner.reset_parameters()

    def folder(self) -> Path | None:
        """Folder of pretrained safetensors files with canonical names; None: initial values from `initialize`."""
        return None

    def place(self, name: str, available: set[str]) -> Place:
        """Place of parameter `name` (canonical) in a pretrained folder that contains the tensors `available`."""
        return name

    def sources(self) -> list[Source]:
        """All folders of pretrained weights, by default only `folder`. Parameters in none of them are initialized."""
        folder = self.folder()
        return [] if folder is None else [Source(folder, self.place)]

    # ---- training

    def lr_scale(self, name: str) -> float:
        """Factor on the learning rate of parameter `name`, as named in `named_parameters`."""
        return 1.0

    def matrices(self) -> set[str]:
        """Names, as in `named_parameters`, of the block parameters that a matrix optimizer updates.

        Embeddings and convolutions are excluded. Names of parameters that are not matrices have no effect.
        """
        others = (nn.Embedding, nn.modules.conv._ConvNd)
        inside = {
            module for block in self.model.blocks() for module in block.modules() if not isinstance(module, others)
        }
        return {
            f"{prefix}.{name}"
            for prefix, module in self.model.named_modules()
            if module in inside
            for name, _ in module.named_parameters(recurse=False)
        }

    # ---- for the platform

    def parameters(self) -> dict[str, nn.Parameter]:
        """Canonical name -> parameter, for all parameters; a tied parameter appears once, under its first name."""
        return {self.model.weights.canonical_name(name): p for name, p in self.model.named_parameters()}

    def buffers(self) -> dict[str, Tensor]:
        """Canonical name -> buffer, for persistent floating-point buffers; checkpoints store them like parameters."""
        return {
            self.model.weights.canonical_name(f"{path}.{name}" if path else name): buffer
            for path, module in self.model.named_modules()
            for name, buffer in module.named_buffers(recurse=False)
            if name not in module._non_persistent_buffers_set and buffer.is_floating_point()
        }


@dataclass(frozen=True)
class Merge:
    """A parameter that export merges with other parameters; the others are left out of the exported folder."""

    others: tuple[str, ...]  # canonical names
    combine: Callable[..., Tensor]  # called with the full fp32 parameter and `others`


# (prefixes, submodel): the parameters with one of these name prefixes. Export strips the submodel's prefix from their
# names. Without a submodel, the names and the configuration are kept.
Part = tuple[tuple[str, ...], "Model | None"]


class Export:
    """Exports a model for use in other programs. By default, config.json contains the model's options."""

    def __init__(self, model: "Model") -> None:
        self.model = model

    def save_config(self, folder: Path) -> None:
        """Write the files of a Hugging Face model folder, except the weights."""
        write_json(folder / "config.json", {"arch": type(self.model).__name__, **asdict(self.model.options)})

    def save_parts(self, folder: Path, names: set[str], read: ReadParameter) -> None:
        """Write files derived from the trained parameters `names` (canonical) to an export or checkpoint folder."""

    def parts(self) -> dict[str, Part]:
        """Parts of the model that can be exported separately; empty by default."""
        return {}

    def merges(self) -> dict[str, Merge]:
        """Canonical name -> merge, for the parameters that export merges; empty by default."""
        return {}
