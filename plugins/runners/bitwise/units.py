"""Sharded layers computed as a fixed number of products, so that the degree of tensor parallelism changes no bit.

A column-parallel layer of width D is D products whose results are concatenated; a row-parallel layer is the sum of D
products in a fixed binary tree. Each of them is a unit. Of t tensor-parallel ranks, each computes D / t consecutive
units; a rank without tensor parallelism computes all of them. Everything else of the model is computed by every rank,
the embedding, the head and experts included.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from crosstrain import ConfigError, Model

from ..megatron.plan import Resolved, resolve, shard_specs, user_of
from ..megatron.tensor_parallel import local
from .partial_sums import PartialSums

_STYLES = ("column", "fused_qkv", "row")
_VECTOR = 64  # activations of a unit must be a multiple; vector instructions treat the rest differently


def plan_of_units(model: Model, over: dict[str, str]) -> Resolved:
    """Return the plan's column-parallel and row-parallel layers."""
    plan = resolve(model, over)
    plan.modules = {name: style for name, style in plan.modules.items() if style in _STYLES}
    return plan


def check_units(model: Model, over: dict[str, str], width: int) -> None:
    """Raise ConfigError if the sharded layers of a model cannot be computed in `width` units."""
    plan = plan_of_units(model, over)
    if plan.summed:
        raise ConfigError(
            f"run.bitwise.width: each unit would have a part of the gradient of {min(plan.summed)}; leave width out"
        )
    try:
        shard_specs(model, plan, width)
    except ConfigError as error:
        raise ConfigError(f"run.bitwise.width: {str(error).partition(': ')[2]}") from None
    for name, style in plan.modules.items():
        _check_dropout(model, name, style)


def _check_dropout(model: Model, name: str, style: str) -> None:
    """Refuse dropout between sharded layers, because each rank would draw random numbers for its own units only."""
    user = user_of(model, name)
    module = model.get_submodule(user)
    rates = {key: rate for key, rate in vars(module).items() if "drop" in key and isinstance(rate, float)}
    for key, child in module.named_modules():
        of_layer = style == "row" and key.partition(".")[0] == name[len(user) + 1 :].partition(".")[0]  # an adapter's
        if isinstance(child, nn.Dropout) and ("att" in key.rpartition(".")[2] or of_layer):
            rates[key] = child.p
    for key, rate in rates.items():
        if rate:
            raise ConfigError(
                f"run.bitwise.width: {model.weights.canonical_name(user)}.{key} is {rate:g}, but dropout between "
                f"sharded layers is not supported; set it to 0"
            )


class _Enter(torch.autograd.Function):
    """Forward: a view for each unit. Backward: the sum of the units' gradients over all ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, count: int, group: dist.ProcessGroup | None) -> tuple[Tensor, ...]:
        ctx.group = group
        return tuple(x.view_as(x) for _ in range(count))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return _total([gradient.clone() for gradient in gradients], ctx.group), None, None


class _Leave(torch.autograd.Function):
    """Forward: the sum of the units' results over all ranks. Backward: identity."""

    @staticmethod
    def forward(ctx: Any, group: dist.ProcessGroup | None, *products: Tensor) -> Tensor:
        ctx.count = len(products)
        return _total([product.clone() for product in products], group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return None, *[gradient] * ctx.count


class _Contiguous(torch.autograd.Function):
    """Forward: identity. Backward: contiguous memory, because products of strided matrices may differ in rounding."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.contiguous()


def _total(parts: Sequence[Tensor], group: dist.ProcessGroup | None) -> Tensor:
    """Return the sum over the units of all ranks in a fixed tree; overwrites `parts`."""
    sums = PartialSums()
    for leaf, part in enumerate(parts):
        sums.add((0, leaf), part)
    total = sums.total()
    assert total is not None
    if group is not None:
        dist.all_reduce(total, group=group)  # the backend sums in a tree over the ranks
    return total


class Units:
    """The `count` units of this rank. group: the tensor-parallel ranks, on a backend that sums in a tree; None: one."""

    def __init__(self, count: int, group: dist.ProcessGroup | None = None) -> None:
        self.count, self.group = count, group

    def __deepcopy__(self, memo: Any) -> Self:
        return self

    def compute(self, model: Model, styles: dict[str, str]) -> None:
        """Make the modules named in `styles` compute with units."""
        for name, style in styles.items():
            module = model.get_submodule(name)
            if style == "row":
                module.forward = partial(self._row, module)
            else:
                module.forward = partial(self._column, module, 3 if style == "fused_qkv" else 1)

    def _column(self, module: nn.Module, parts: int, x: Tensor) -> Tensor:
        """Compute a column-parallel layer with `parts` matrices in one weight, such as queries, keys and values."""
        weights = self._rows(_weight(module), parts)
        biases = self._rows(local(module.bias), parts) if module.bias is not None else [None] * self.count
        inputs = _Enter.apply(x, self.count, self.group)
        outputs = []
        for unit, weight, bias in zip(inputs, weights, biases, strict=True):
            outputs.append(_Contiguous.apply(functional.linear(unit, weight, bias)))
        if torch.is_grad_enabled() and outputs[0].numel() % _VECTOR:
            raise ConfigError(
                f"run.bitwise.width: a unit has {outputs[0].numel()} activations, which is no multiple of {_VECTOR}; "
                f"use a smaller width"
            )
        return torch.stack(outputs, -2).unflatten(-1, (parts, -1)).transpose(-2, -3).flatten(-3)

    def _row(self, module: nn.Module, x: Tensor) -> Tensor:
        weights = _weight(module).unflatten(1, (self.count, -1)).unbind(1)
        inputs = x.unflatten(-1, (self.count, -1)).unbind(-2)
        products = []
        for unit, weight in zip(inputs, weights, strict=True):
            products.append(functional.linear(unit.contiguous(), weight.contiguous()))
        y = _Leave.apply(self.group, *products)
        return y if module.bias is None else y + module.bias.to(y.dtype)  # y has half precision under autocast

    def _rows(self, tensor: Tensor, parts: int) -> list[Tensor]:
        """Return each unit's rows of a weight or bias of `parts` parts."""
        units = tensor.unflatten(0, (parts, self.count, -1)).transpose(0, 1).flatten(1, 2)
        return [unit.contiguous() for unit in units.unbind()]


def _weight(module: nn.Module) -> Tensor:
    """Return this rank's weight as [out, in]."""
    weight = local(module.weight)
    return weight.T if isinstance(module, Conv1D) else weight
