"""AdamW."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from crosstrain.registry import registry


@registry.register_optimizer("adamw")
class AdamW(torch.optim.AdamW):
    """Adam with decoupled weight decay (Loshchilov & Hutter, 2019), as torch's fused kernel."""

    @dataclass
    class Options:
        """Options of `run.optimizer`; rate and decay are `run.init_lr` and `run.weight_decay`."""

        betas: tuple[float, float] = (0.9, 0.999)
        eps: float = 1e-8

    def __init__(self, groups: list[dict[str, Any]], lr: float, options: Options) -> None:
        super().__init__(groups, lr=lr, betas=tuple(options.betas), eps=options.eps, fused=True)
