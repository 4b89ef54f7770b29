"""Shard a model on the meta device: replace its parameters with this tensor-parallel rank's slices."""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from crosstrain import Model

from .plan import Resolved, shard_specs
from .shard_spec import ShardSpec
from .tensor_parallel import TensorParallel, compute_with_slices


def shard_model(model: Model, plan: Resolved, tensor: TensorParallel, mesh: DeviceMesh) -> dict[str, ShardSpec]:
    """Replace parameters with this rank's slices, and make the modules compute with them.

    Returns parameter name -> shard spec. Raises ConfigError as `shard_specs` does.
    """
    names = {parameter: name for name, parameter in model.named_parameters()}
    cuts: dict[str, ShardSpec] = {}
    slices: dict[nn.Parameter, nn.Parameter] = {}
    for (module_name, attribute), cut in shard_specs(model, plan, tensor.size).items():
        parameter = model.get_submodule(module_name).get_parameter(attribute)
        cuts[names[parameter]] = cut
        slices[parameter] = _slice(parameter, cut, mesh)
    _replace(model, slices)
    for module_name, attribute in plan.attributes:
        owner = model.get_submodule(module_name)
        setattr(owner, attribute, getattr(owner, attribute) // tensor.size)
    compute_with_slices(model, plan.modules, tensor)
    return cuts


def _slice(parameter: nn.Parameter, cut: ShardSpec, mesh: DeviceMesh) -> nn.Parameter:
    """Return a rank's slice of a parameter on the meta device."""
    mine = torch.empty(cut.local, dtype=parameter.dtype, device="meta")
    whole = torch.empty(cut.full, device="meta")
    shape, stride = whole.shape, whole.stride()
    spread = DTensor.from_local(mine, mesh, [cut.placement], run_check=False, shape=shape, stride=stride)
    return nn.Parameter(spread, requires_grad=parameter.requires_grad)


def _replace(model: Model, replaced: dict[nn.Parameter, nn.Parameter]) -> None:
    """Replace parameters in every module that uses them; tied parameters stay tied."""
    for module in model.modules():
        for attribute, parameter in module._parameters.items():
            if parameter in replaced:
                module._parameters[attribute] = replaced[parameter]
