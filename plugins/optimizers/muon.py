"""Muon."""

import math
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import torch
from annotated_types import Interval
from torch import Tensor

from crosstrain import MatrixOptimizer, PositiveFloat, registry

from .elementwise import AdamW, Beta

_A, _B, _C = 3.4445, -4.7750, 2.0315  # coefficients of the quintic iteration, from Keller Jordan's blog post
_EPS = 1e-7


@registry.register_optimizer("muon")
class Muon(MatrixOptimizer):
    """Orthogonalized momentum (Jordan et al., 2024) for hidden matrices, and AdamW for all other parameters.

    The formulas come from torch.optim.Muon. A fused matrix, for example of queries, keys and values, is updated as one
    matrix.
    """

    @dataclass
    class Options:
        """Options of `run.optimizer`; learning rate and decay are `run.init_lr` and `run.weight_decay`."""

        momentum: Beta = 0.95  # decay rate of the average of gradients
        nesterov: bool = True  # use Nesterov momentum
        ns_steps: Annotated[int, Interval(ge=1, lt=100)] = 5  # Newton-Schulz iterations
        ns_dtype: Literal["bf16", "fp32"] = "bf16"  # dtype of the Newton-Schulz iterations
        # factor on the learning rate of a matrix [m, n]; match_rms_adamw: 0.2 sqrt(max(m, n)), for a rate tuned for
        # AdamW; original: sqrt(max(1, m / n))
        adjust_lr_fn: Literal["match_rms_adamw", "original"] = "match_rms_adamw"
        adamw_lr_scale: PositiveFloat = 1.0  # factor on the learning rate of AdamW's parameters
        adamw: AdamW.Options = field(default_factory=AdamW.Options)  # AdamW for embeddings, heads, norms and biases

    def __init__(self, groups: list[dict[str, Any]], lr: float, options: Options) -> None:
        super().__init__(groups, lr, lambda plain: AdamW(plain, lr, options.adamw))
        self.options, self.dtype = options, {"bf16": torch.bfloat16, "fp32": torch.float32}[options.ns_dtype]
        for group in self.param_groups:
            if "matrices" not in group:
                group["lr_scale"] = group.get("lr_scale", 1.0) * options.adamw_lr_scale

    def direction(self, gradient: Tensor, state: dict[str, Any]) -> Tensor:
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        average = state["momentum_buffer"].lerp_(gradient, 1 - self.options.momentum)
        return gradient.lerp_(average, self.options.momentum) if self.options.nesterov else average

    def transform(self, matrix: Tensor, state: dict[str, Tensor]) -> Tensor:
        if matrix.ndim > 2:
            return torch.stack([self.transform(each, state) for each in matrix])
        x = (matrix.T if matrix.shape[0] > matrix.shape[1] else matrix).to(self.dtype)
        x = x / x.norm().clamp(min=_EPS)
        for _ in range(self.options.ns_steps):
            gram = x @ x.T
            x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=_B, alpha=_C), x, beta=_A)
        return x.T if matrix.shape[0] > matrix.shape[1] else x

    def apply(self, weight: Tensor, update: Tensor, group: dict[str, Any], shape: tuple[int, ...]) -> None:
        rows, columns = shape[-2:]
        matches_adamw = self.options.adjust_lr_fn == "match_rms_adamw"
        factor = 0.2 * math.sqrt(max(rows, columns)) if matches_adamw else math.sqrt(max(1, rows / columns))
        weight.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-group["lr"] * factor)
