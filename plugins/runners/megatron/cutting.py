"""A model on the meta device, of which every tensor-parallel rank keeps its slices."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from crosstrain.errors import ConfigError
from crosstrain.model import Model

from .layers import TensorParallel, compute_with_slices
from .layout import Cut
from .plan import Resolved, cut_of
from .vocabulary import ParallelHead


def cut_model(model: Model, plan: Resolved, tensor: TensorParallel, mesh: DeviceMesh) -> dict[str, Cut]:
    """Put this rank's slices in the place of parameters, and have the modules compute with them.

    Returns how parameters were cut, by the model's own names. Raises ConfigError where the plan cuts nothing, or
    something does not divide.
    """
    if not plan.modules:
        raise ConfigError(
            f"run.runner.tensor_parallel: {type(model).__name__} has no plan that says how to cut its parameters; "
            f"write one under run.runner.plan"
        )
    for module_name, style in plan.modules.items():
        if style == "vocabulary":
            _pad_vocabulary(model, module_name, tensor.size)
    names = {parameter: name for name, parameter in model.named_parameters()}
    cuts: dict[str, Cut] = {}
    slices: dict[nn.Parameter, nn.Parameter] = {}
    for module_name, style in plan.modules.items():
        for attribute, parameter in model.get_submodule(module_name).named_parameters(recurse=False):
            cut = cut_of(model, module_name, attribute, style, tensor.size)
            if cut is not None:
                cuts[names[parameter]] = cut
                slices[parameter] = _slice(parameter, cut, mesh)
    _replace(model, slices)
    for module_name, attribute in plan.attributes:
        owner = model.get_submodule(module_name)
        setattr(owner, attribute, getattr(owner, attribute) // tensor.size)
    compute_with_slices(model, plan.modules, tensor)
    model.head = ParallelHead(tensor)
    return cuts


def _pad_vocabulary(model: Model, module_name: str, ranks: int) -> None:
    """As many rows as every rank gets the same multiple of."""
    old = model.get_submodule(module_name).weight
    name = next(name for name, parameter in model.named_parameters() if parameter is old)
    multiple = model.vocabulary_multiple * ranks
    logical = model.logical_shape(model.canonical_name(name), old.shape)[0]
    rows = -(-logical // multiple) * multiple
    new = nn.Parameter(torch.empty(rows, *old.shape[1:], dtype=old.dtype, device="meta"), old.requires_grad)
    _replace(model, {old: new})


def _slice(parameter: nn.Parameter, cut: Cut, mesh: DeviceMesh) -> nn.Parameter:
    """A rank's slice of a parameter, on the meta device as that is."""
    mine = torch.empty(cut.local, dtype=parameter.dtype, device="meta")
    shape, stride = parameter.shape, parameter.stride()
    whole = DTensor.from_local(mine, mesh, [cut.placement], run_check=False, shape=shape, stride=stride)
    return nn.Parameter(whole, requires_grad=parameter.requires_grad)


def _replace(model: Model, replaced: dict[nn.Parameter, nn.Parameter]) -> None:
    """Exchange parameters wherever they are used: tied ones stay tied."""
    for module in model.modules():
        for attribute, parameter in module._parameters.items():
            if parameter in replaced:
                module._parameters[attribute] = replaced[parameter]
