"""Adapters and four-bit weights of experts in stacked parameters."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


def innermost(module: nn.Module) -> Any:
    """Return the experts inside of wrappers."""
    while isinstance(module, Stacked):
        module = module.base_layer
    return module


def matrices_of(experts: nn.Module) -> list[str]:
    """Return the names of the parameters with one matrix per expert."""
    return [name for name, parameter in experts.named_parameters(recurse=False) if parameter.ndim == 3]


class Stacked(nn.Module):
    """A wrapper around a module of experts that changes one of its stacked parameters.

    Wrappers are nested, as in peft, one per change. The outermost wrapper composes the weights in each forward. The
    backward composes them again, so composed weights are not kept.
    """

    def __init__(self, inner: nn.Module, parameter: str) -> None:
        super().__init__()
        self.base_layer, self.parameter = inner, parameter

    def changed(self, weights: dict[str, Any]) -> Tensor:
        """Return the changed parameter; `weights`: name -> parameter of the experts."""
        raise NotImplementedError

    def composed(self) -> tuple[nn.Module, dict[str, Any]]:
        """Return the innermost module and its composed parameters."""
        inner = self.base_layer
        experts, weights = (
            inner.composed() if isinstance(inner, Stacked) else (inner, dict(inner.named_parameters(recurse=False)))
        )
        weights[self.parameter] = self.changed(weights)
        return experts, weights

    def forward(self, *inputs: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            return checkpoint(self._compute, *inputs, use_reentrant=False, preserve_rng_state=False)
        return self._compute(*inputs)

    def _compute(self, *inputs: Tensor) -> Tensor:
        return torch.func.functional_call(*self.composed(), inputs)


class StackedLora(Stacked):
    """LoRA on a stack of matrices [E, out, in], or [E, in, out] if `transposed`, as peft's `target_parameters`.

    lora_A: [E * rank, in], expert by expert. lora_B: [out, rank * E], where expert e has the columns e, e + E, ...
    """

    def __init__(self, inner: nn.Module, parameter: str, rank: int, alpha: float) -> None:
        super().__init__(inner, parameter)
        experts = innermost(inner)
        self.transposed, self.scale = experts.is_transposed, alpha / rank
        count, *sides = getattr(experts, parameter).shape
        width, out = sides if self.transposed else reversed(sides)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(width, rank * count, bias=False, device="meta")})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank * count, out, bias=False, device="meta")})

    def changed(self, weights: dict[str, Any]) -> Tensor:
        a, b = self.lora_A["default"].weight, self.lora_B["default"].weight
        with torch.autocast(a.device.type, enabled=False):
            return self.merged(weights[self.parameter], a, b)

    def merged(self, stack: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """Return the stack plus the adapter's change."""
        change = b.view(len(b), -1, len(stack)).permute(2, 0, 1) @ a.view(len(stack), -1, a.shape[1])
        return stack + self.scale * (change.mT if self.transposed else change)
