"""Build a model without computing initial values that would be discarded.

Weights are filled by canonical name from a checkpoint, a pretrained folder or `Weights.initialize`. The values that
library constructors draw are never used. On the meta device, drawing these values costs nothing.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode

M = TypeVar("M", bound=nn.Module)
_LARGE = 2**28  # elements; smaller tensors fit in memory even on a small machine


class _LargeOnMeta(TorchFunctionMode):
    """Creates large tensors directly on the meta device, because a layer's experts may exceed the machine's memory."""

    def __torch_function__(self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function in (torch.empty, torch.zeros, torch.ones, torch.rand, torch.randn):
            sizes = args[0] if args and not isinstance(args[0], int) else args or kwargs.get("size", ())
            if math.prod(sizes) > _LARGE:
                kwargs = kwargs | {"device": "meta"}
        return function(*args, **kwargs)


@contextmanager
def parameters_on_meta(
    at_most: int | None = None, seconds: float = math.inf, but: Callable[[nn.Parameter], bool] = lambda _: False
) -> Iterator[None]:
    """Put parameters registered in this context on the meta device, unless `but(parameter)` is True.

    Buffers are not moved. Raises ValueError for more than `at_most` parameters (None: no limit) or after `seconds`,
    because an untrusted configuration may describe a model that takes forever to build.
    """
    register = nn.Module.register_parameter
    registered, deadline = 0, time.monotonic() + seconds

    def register_on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        nonlocal registered
        registered += 1
        if at_most is not None and registered > at_most:
            raise ValueError(f"it has more than {at_most} parameters")
        if time.monotonic() > deadline:
            raise ValueError(f"building it takes more than {seconds:g} s: {registered} parameters so far")
        if parameter is not None and parameter.device.type != "meta" and not but(parameter):
            parameter = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
        register(module, name, parameter)

    with patch.object(nn.Module, "register_parameter", register_on_meta), _LargeOnMeta():
        yield


def materialize(model: M, device: torch.device) -> M:
    """Replace every parameter by zeros on `device`, keep tied parameters tied, and move the buffers to `device`."""
    made = {p: nn.Parameter(torch.zeros_like(p, device=device), p.requires_grad) for p in model.parameters()}
    replace_parameters(model, made)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
            module._buffers[name] = buffer.to(device)
    return model


def replace_parameters(model: nn.Module, replaced: Mapping[nn.Parameter, nn.Parameter]) -> None:
    """Replace parameters in every module that uses them; tied parameters stay tied."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter in replaced:
                module._parameters[name] = replaced[parameter]


def has_values(tensor: Tensor) -> bool:
    """Return False for a tensor without data: a meta tensor, or a fake tensor in the trace of a plan."""
    return not isinstance(tensor, FakeTensor) and tensor.device.type != "meta"
