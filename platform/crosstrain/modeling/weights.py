"""A model's weights: their names, shapes and initial values, and the folders that they start from."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from crosstrain.modeling.pretrained import Place, Source
from crosstrain.utils.errors import ConfigError

if TYPE_CHECKING:
    from crosstrain.modeling.base import Model


class Quantized(Protocol):
    """A frozen parameter that is kept in few bits."""

    shape: torch.Size  # logical

    def quantize(self, value: Tensor) -> None:
        """Take the whole value, fp32; called once, after a runner has sharded the model."""


class Weights:
    """Names and values of a model's parameters. By default as torch has them.

    *Canonical* names and *logical* shapes are those that Hugging Face uses for the same weights. Checkpoints and
    initial values are keyed by them.
    """

    vocabulary_multiple = 1  # divides the rows of embedding and head, with padding, on each rank that has some of them

    def __init__(self, model: Model) -> None:
        self.model = model

    def canonical_name(self, name: str) -> str:
        """The Hugging Face name of the parameter that `named_parameters` calls `name`."""
        return name

    def logical_shape(self, name: str, shape: torch.Size) -> torch.Size:
        """Shape without padding of parameter `name` (canonical), which has `shape` with it."""
        return shape

    def quantized(self) -> Mapping[str, Quantized]:
        """Frozen parameters (canonical names) in a different form, which are read from pretrained weights; none."""
        return {}

    def initialize(self, name: str, value: Tensor, rng: torch.Generator) -> None:
        """Fill `value` (fp32, CPU, logical shape) with the initial value of parameter `name` (canonical).

        By default with the one that `reset_parameters` of its module gives. Must draw from `rng` only, so that the
        value depends on nothing but (seed, name, shape).
        """
        own = next(own for own, _ in self.model.named_parameters() if self.model.weights.canonical_name(own) == name)
        path, _, attribute = own.rpartition(".")
        owner: Any = self.model.get_submodule(path)
        if not hasattr(owner, "reset_parameters"):
            raise ConfigError(
                f"model: {type(owner).__name__} has no reset_parameters for {name}; give the model a "
                f"crosstrain.Weights with initialize"
            )
        kept = dict(owner._parameters)
        others = {key: p if p is None else nn.Parameter(p.detach().to("meta")) for key, p in kept.items()}
        owner._parameters.update(others | {attribute: nn.Parameter(value, requires_grad=False)})
        try:
            with torch.random.fork_rng(devices=[]):
                torch.set_rng_state(rng.get_state())
                owner.reset_parameters()
        finally:
            owner._parameters.update(kept)

    def folder(self) -> Path | None:
        """Folder of safetensors files under canonical names to start from instead of `initialize`, if any."""
        return None

    def place(self, name: str, available: set[str]) -> Place:
        """Name of parameter `name` (canonical) in a pretrained folder that holds the names `available`."""
        return name

    def sources(self) -> list[Source]:
        """Every folder that parameters start from, by default `folder`; others get initial values."""
        folder = self.folder()
        return [] if folder is None else [Source(folder, self.place)]

    # ---- training

    def lr_scale(self, name: str) -> float:
        """Factor on the learning rate of the parameter that `named_parameters` calls `name`; of any other, 1."""
        return 1.0

    def matrices(self) -> set[str]:
        """Names, as `named_parameters` has them, of what optimizers of whole matrices update: matrices of the blocks.

        Embeddings and convolutions are not among them. Names of other parameters than matrices have no effect.
        """
        others = (nn.Embedding, nn.modules.conv._ConvNd)
        blocks = self.model.blocks()
        inside = {module for block in blocks for module in block.modules() if not isinstance(module, others)}
        return {
            f"{prefix}.{name}" for prefix, module in self.model.named_modules() if module in inside
            for name, _ in module.named_parameters(recurse=False)
        }  # fmt: skip

    # ---- for the platform

    def parameters(self) -> dict[str, nn.Parameter]:
        """Every parameter once (a tied one under its first name), by canonical name."""
        name_of = self.model.weights.canonical_name
        return {name_of(name): parameter for name, parameter in self.model.named_parameters()}

    def buffers(self) -> dict[str, Tensor]:
        """Every persistent buffer of floating point, by canonical name; checkpoints hold them as they do parameters."""
        return {
            self.model.weights.canonical_name(f"{path}.{name}" if path else name): buffer
            for path, module in self.model.named_modules()
            for name, buffer in module.named_buffers(recurse=False)
            if name not in module._non_persistent_buffers_set and buffer.is_floating_point()
        }
