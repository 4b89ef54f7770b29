"""Local SGD: ranks train apart and meet seldom.

The outer optimizer is SGD with Nesterov momentum over the ranks' mean change, as in DiLoCo (Douillard et al., 2023).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from crosstrain import (
    Capabilities,
    Fraction,
    MakeOptimizer,
    Model,
    PositiveFloat,
    PositiveInt,
    Runner,
    RunOptions,
    StepResult,
    registry,
)


@registry.register_runner("local_sgd")
class LocalSGD(Runner):
    """Each rank takes `inner_steps` steps on its own samples; then the outer optimizer moves all to one point."""

    @dataclass
    class Options:
        """The outer optimizer's published defaults."""

        inner_steps: PositiveInt = 100  # steps that ranks make apart before they meet
        outer_lr: PositiveFloat = 0.7
        outer_momentum: Fraction = 0.9
        nesterov: bool = True

    capabilities = Capabilities(exact=False)

    def __init__(self, options: Any, run: RunOptions) -> None:
        super().__init__(options, run)
        self.state = {"apart": 0}  # steps since ranks met

    def prepare(self, model: Model, make_optimizer: MakeOptimizer | None) -> None:
        super().prepare(model, make_optimizer)
        trained = [p for p in model.parameters() if p.requires_grad]
        self.anchors = {p: p.detach().clone() for p in trained}  # the parameters when ranks met
        self.momenta = {p: torch.zeros_like(p) for p in trained}
        self.held.extra["outer_momentum"] = self.momenta
        self.held.equal = {"param", "runner:outer_momentum"}

    def loaded(self) -> None:
        for p, anchor in self.anchors.items():
            anchor.copy_(p.detach())

    def meets(self, step: int) -> bool:
        return self.state["apart"] + 1 >= self.options.inner_steps

    def optimizer_step(self, apply: bool = True) -> StepResult:
        result = super().optimizer_step(apply)
        self.state["apart"] += 1
        if self.state["apart"] < self.options.inner_steps:
            return result
        self.synchronize()
        return StepResult(result.grad_norm, applied=True)

    @torch.no_grad()
    def synchronize(self) -> None:
        if self.state["apart"] == 0:
            return
        with self.timers("outer step"):
            changes = self._mean([anchor - p for p, anchor in self.anchors.items()])
            for (p, anchor), change in zip(self.anchors.items(), changes, strict=True):
                momentum = self.momenta[p].mul_(self.options.outer_momentum).add_(change)
                if self.options.nesterov:
                    momentum = change.add(momentum, alpha=self.options.outer_momentum)
                p.copy_(anchor.sub_(momentum, alpha=self.options.outer_lr))
        self.state["apart"] = 0

    def _mean(self, tensors: list[Tensor]) -> list[Tensor]:
        """Means of tensors over the ranks, in one exchange."""
        flat = torch.cat([tensor.flatten() for tensor in tensors])
        if self.world.size > 1:
            dist.all_reduce(flat, group=self.world.process_group)
        parts = flat.div_(self.world.size).split([tensor.numel() for tensor in tensors])
        return [part.view_as(tensor) for part, tensor in zip(parts, tensors, strict=True)]
