"""torch's elementwise optimizers."""

from dataclasses import dataclass
from typing import Annotated, Any

import torch
from annotated_types import Interval

from crosstrain import OptionError, registry

Beta = Annotated[float, Interval(ge=0, lt=1)]


@registry.register_optimizer("adamw")
class AdamW(torch.optim.Adam):
    """torch's fused AdamW (Loshchilov & Hutter, 2019), optionally with L2 regularization instead of weight decay."""

    @dataclass
    class Options:
        """Options of `run.optimizer`; learning rate and decay are `run.init_lr` and `run.weight_decay`."""

        betas: tuple[Beta, Beta] = (0.9, 0.999)  # decay rates of the averages of gradients and squared gradients
        eps: Annotated[float, Interval(gt=0, le=1)] = 1e-8  # constant added to the square root in the denominator
        decoupled: bool = True  # False: add the weight decay to the gradient (Adam with L2 regularization)

    def __init__(self, groups: list[dict[str, Any]], lr: float, options: Options) -> None:
        super().__init__(
            groups,
            lr=lr,
            betas=tuple(options.betas),
            eps=options.eps,
            fused=True,
            decoupled_weight_decay=options.decoupled,
        )


@registry.register_optimizer("sgd")
class SGD(torch.optim.SGD):
    """SGD, optionally with momentum.

    Its updates scale with the gradients, so SGD is a stricter test of runners than Adam.
    """

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
