"""Expert parallelism: each rank of a group holds some of the experts, and tokens are sent to their experts' ranks.

transformers 5.24 has an implementation (`transformers.distributed.expert_parallel`), but older supported versions do
not, and it does not support pipeline parallelism. transformers' code also reads split sizes from tensors, which
have no values when a run is planned. The forward of the experts is taken from transformers.
"""

import math
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from crosstrain import ConfigError, Model, has_values
from crosstrain.modeling.context import WithGroup


def check_experts(model: Model, ranks: int) -> None:
    """Raise ConfigError unless the model has experts and `ranks` divides their number."""
    counts = [experts.num_experts for experts in model.structure.experts().values()]
    if not counts:
        family = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
        raise ConfigError(f"run.runner.expert_parallel: {family} has no experts in stacked parameters; use 1")
    common = math.gcd(*counts)
    if common % ranks:
        allowed = ", ".join(str(n) for n in range(1, common + 1) if common % n == 0)
        raise ConfigError(
            f"run.runner.expert_parallel: {min(counts)} experts cannot be shared evenly by {ranks} ranks; use one of "
            f"{allowed}"
        )


def local_forward(experts: nn.Module, *inputs: Tensor) -> Tensor:
    """Call the experts' original forward; DTensor parameters are replaced by this rank's local tensors."""
    kept: dict[str, Any] = dict(experts._parameters)
    slices: dict[str, Any] = {name: p.to_local() for name, p in kept.items() if isinstance(p, DTensor)}
    experts._parameters.update(slices)
    try:
        return type(experts).forward(experts, *inputs)
    finally:
        experts._parameters.update(kept)


def _one_expert_each(experts: nn.Module, rows: Tensor, numbers: Tensor) -> Tensor:
    """Return the output of expert `numbers[i]` for each row i."""
    return local_forward(experts, rows, numbers[:, None], torch.ones_like(numbers[:, None], dtype=rows.dtype))


def weighted(out: Tensor, order: Tensor, weights: Tensor) -> Tensor:
    """Return each token's weighted sum of outputs, [tokens, width].

    out: outputs of (token, expert) pairs, [tokens * k, width], in the order `order`. weights: [tokens, k].
    """
    return (out[order.argsort()].view(*weights.shape, -1) * weights[..., None]).sum(1)


class _Exchange(torch.autograd.Function):
    """Differentiable all-to-all: send rows [sum(send), width], receive rows [sum(receive), width]."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.back = receive, send, group
        out = rows.new_empty(sum(receive), rows.shape[1])
        dist.all_to_all_single(out, rows.contiguous(), receive, send, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _Exchange.apply(grad, *ctx.back), None, None, None


class ExpertParallel(WithGroup):
    """A process group over which experts are sharded: each stack of experts is split into equal parts in rank order."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.size = group, dist.get_world_size(group)

    def shard(self, model: Model) -> set[str]:
        """Reduce a model on the meta device to this rank's experts, and replace the experts' forward.

        The new forward exchanges tokens with the other ranks. Returns the names of the sharded parameters in the model.
        """
        names = set()
        for name, experts in model.structure.experts().items():
            experts.num_experts //= self.size
            for own, parameter in experts.named_parameters(recurse=False):
                mine = torch.empty(experts.num_experts, *parameter.shape[1:], dtype=parameter.dtype, device="meta")
                experts._parameters[own] = nn.Parameter(mine, parameter.requires_grad)
                names.add(f"{name}.{own}")
            experts.forward = partial(self._forward, experts)
        return names

    def _forward(self, experts: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Forward of `experts`, a stack that holds only this rank's experts.

        hidden_states: this rank's tokens [tokens, width]. top_k_index: global expert indices [tokens, k].
        top_k_weights: [tokens, k]. No token is dropped: there is no capacity limit.
        """
        mine, k = experts.num_experts, top_k_index.shape[1]
        order = top_k_index.flatten().argsort(stable=True)  # groups the (token, expert) pairs by destination rank
        numbers = torch.arange(self.size * mine, device=hidden_states.device)
        counts = (top_k_index.reshape(-1, 1) == numbers).sum(0)
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts, group=self.group)
        if has_values(counts):
            send, receive = torch.stack([counts, arriving]).view(2, self.size, mine).sum(2).tolist()
        else:  # a plan assumes balanced routing
            send = receive = [len(order) // self.size + (n < len(order) % self.size) for n in range(self.size)]
        rows = _Exchange.apply(hidden_states[order // k], send, receive, self.group)
        numbers = numbers[:mine].repeat(self.size).repeat_interleave(arriving, output_size=sum(receive))
        out = _Exchange.apply(self.compute(experts, rows, numbers, receive), receive, send, self.group)
        return weighted(out, order, top_k_weights).to(hidden_states.dtype)

    def compute(self, experts: nn.Module, rows: Tensor, numbers: Tensor, counts: list[int]) -> Tensor:
        """Return the outputs of this rank's experts `numbers` for rows [sum(counts), width].

        The rows are sorted by the rank that sent them; `counts` has their number for each rank.
        """
        if not len(rows):  # a row of zeros keeps the autograd graph, so the backward exchanges too
            return _one_expert_each(experts, rows.sum(0, keepdim=True), numbers.new_zeros(1))[:0]
        return _one_expert_each(experts, rows, numbers)
