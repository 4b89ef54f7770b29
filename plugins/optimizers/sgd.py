"""Stochastic gradient descent."""

from dataclasses import dataclass
from typing import Annotated, Any

import torch
from annotated_types import Interval

from crosstrain import OptionError, registry


@registry.register_optimizer("sgd")
class SGD(torch.optim.SGD):
    """SGD, optionally with momentum; updates scale with the gradients, so it tests runners more strictly than Adam."""

    @dataclass
    class Options:
        """Options of `run.optimizer`; learning rate and decay are `run.init_lr` and `run.weight_decay`."""

        momentum: Annotated[float, Interval(ge=0, lt=1)] = 0.0  # decay rate of the sum of gradients; 0: no momentum
        nesterov: bool = False  # use Nesterov momentum

        def __post_init__(self) -> None:
            if self.nesterov and not self.momentum:
                raise OptionError("nesterov", "needs a momentum above 0")

    def __init__(self, groups: list[dict[str, Any]], lr: float, options: Options) -> None:
        super().__init__(groups, lr=lr, momentum=options.momentum, nesterov=options.nesterov)
