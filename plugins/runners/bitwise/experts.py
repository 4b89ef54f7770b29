"""Experts to the same bits: a rank computes the tokens of each rank that sent some on their own."""

from inspect import unwrap
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..megatron.expert_parallel import ExpertParallel, weighted


class _Tapped(torch.autograd.Function):
    """Forward: a view of a parameter. Backward: keep the gradient in `taps`, not in the parameter."""

    @staticmethod
    def forward(ctx: Any, parameter: nn.Parameter, taps: dict[nn.Parameter, Tensor]) -> Tensor:
        ctx.kept = parameter, taps
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None]:
        parameter, taps = ctx.kept
        taps[parameter] = gradient if parameter not in taps else taps[parameter] + gradient
        return None, None


class ExpertSources(ExpertParallel):
    """Expert parallelism that keeps the gradients of each source, a rank that sends tokens, apart.

    taps: for each source, the gradients of its micro batch. They are those of one process, because a matrix product has
    the same rows as in one process.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group)
        self.taps: list[dict[nn.Parameter, Tensor]] = [{} for _ in range(self.size)]

    def compute(self, experts: nn.Module, rows: Tensor, numbers: Tensor, counts: list[int]) -> Tensor:
        outputs, own = [rows[:0]], dict(experts._parameters)
        for taps, sent, chosen in zip(self.taps, rows.split(counts), numbers.split(counts), strict=True):
            tapped: dict[str, Any] = {name: _Tapped.apply(p, taps) for name, p in own.items()}
            with patch.dict(experts._parameters, tapped):
                outputs += [_one_each(experts, sent, chosen)] if len(sent) else []
        return torch.cat(outputs)


def all_experts(experts: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Forward of a stack of all experts, with the order of sums that expert parallelism has."""
    order = top_k_index.flatten().argsort(stable=True)
    out = _one_each(experts, hidden_states[order // top_k_index.shape[1]], top_k_index.flatten()[order])
    return weighted(out, order, top_k_weights).to(hidden_states.dtype)


def _one_each(experts: nn.Module, rows: Tensor, numbers: Tensor) -> Tensor:
    """Return the output of expert `numbers[i]` for each row i.

    transformers' decorator may choose an implementation with grouped products, whose gradients depend on the number of
    groups. The forward without the decorator has one product for each expert.
    """
    forward = unwrap(type(experts).forward)
    return forward(experts, rows, numbers[:, None], torch.ones_like(numbers[:, None], dtype=rows.dtype))
