"""An optimizer with steps of equal size."""

from dataclasses import dataclass
from typing import Any

import torch

from crosstrain import Fraction, registry


@registry.register_optimizer("example")
class ExampleOptimizer(torch.optim.Optimizer):
    """Steps of equal size along the signs of a moving average of the gradient."""

    @dataclass
    class Options:
        momentum: Fraction = 0.9  # decay of the moving average

    def __init__(self, groups: list[dict[str, Any]], lr: float, options: Options) -> None:
        super().__init__(groups, {"lr": lr, "momentum": options.momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["average"] = torch.zeros_like(p)
                average = state["average"].lerp_(p.grad, 1 - group["momentum"])
                p.mul_(1 - group["lr"] * group["weight_decay"]).sub_(average.sign(), alpha=group["lr"])
