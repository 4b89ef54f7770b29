"""Float8 products under tensor parallelism, with scales that are equal on all ranks."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


def in_float8(module: nn.Module) -> bool:
    """Return True for torchao's layers."""
    return hasattr(module, "linear_mm_config")


def float8_product(layer: Any, x: Tensor, weight: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the product of torchao's `layer` for an input [..., in] and a weight [out, in].

    Ranks hold slices of the input, the weight or the output. Values are scaled by the largest value on all ranks, so
    that a slice has the same float8 values as in the whole tensor.
    """
    from torchao.float8.float8_linear import matmul_with_hp_or_float8_args as product
    from torchao.float8.float8_training_tensor import GemmInputRole as Role

    config, settings = layer.config, layer.linear_mm_config
    cast = partial(_cast, group=group, settings=settings)
    dtype = torch.get_autocast_dtype(x.device.type)
    y = product.apply(
        cast(x.to(dtype), config.cast_config_input, Role.INPUT),
        cast(weight.T, config.cast_config_weight, Role.WEIGHT),
        settings,
        config,
    )
    return _CastGradient.apply(y, partial(cast, cast=config.cast_config_grad_output, role=Role.GRAD_OUTPUT))


def _cast(values: Tensor, cast: Any, role: Any, group: dist.ProcessGroup, settings: Any) -> Tensor:
    """Round to float8, scaled by the largest value on all ranks."""
    from torchao.float8 import float8_training_tensor, float8_utils

    largest = values.detach().abs().amax()
    dist.all_reduce(largest, dist.ReduceOp.MAX, group)
    scale = float8_utils.amax_to_scale(largest, cast.target_dtype)
    return float8_training_tensor.hp_tensor_and_scale_to_float8(values, scale, cast.target_dtype, settings, role)


class _CastGradient(torch.autograd.Function):
    """Forward: identity. Backward: round the gradient to float8."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, cast: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.cast = cast
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.cast(grad), None
