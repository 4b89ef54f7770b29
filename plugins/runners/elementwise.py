"""A check of optimizers for runners that cut parameters into pieces."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from crosstrain import ConfigError, MakeOptimizer


def check_elementwise(make_optimizer: MakeOptimizer) -> None:
    """Raise ConfigError unless the optimizer is elementwise, for runners that split parameters.

    The check runs the optimizer: updating a matrix must give the same values as updating its two halves separately.
    """
    numbers = torch.randn(4, 4, 4, generator=torch.Generator().manual_seed(0))

    def moved(cut: Callable[[Tensor], Sequence[Tensor]]) -> Tensor:
        parameters = [nn.Parameter(part.clone()) for part in cut(numbers[0])]
        optimizer = make_optimizer(((str(i), p) for i, p in enumerate(parameters)), lambda _: numbers[0].shape)
        for group in optimizer.param_groups:
            group["lr"] = 0.1
        for gradient in numbers[1:]:
            for p, part in zip(parameters, cut(gradient), strict=True):
                p.grad = part.clone()
            optimizer.step()
        return torch.cat([p.detach().flatten() for p in parameters])

    if not torch.allclose(moved(lambda t: [t]), moved(lambda t: t.flatten().split(8)), rtol=1e-5):
        raise ConfigError(
            "run.optimizer: it treats a parameter as a whole, and the runner cuts parameters into pieces; use an "
            "optimizer such as adamw or muon, or a runner such as ddp"
        )
