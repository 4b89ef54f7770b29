"""Parameter groups, optimizer state and gradients, handled the same way for every registered optimizer."""

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from crosstrain.checkpoint.boxes import Shard
from crosstrain.config.load import Config
from crosstrain.config.registry import registry
from crosstrain.distributed.group import Group
from crosstrain.modeling.base import Model
from crosstrain.utils.errors import ConfigError

NamedParameters = Iterable[tuple[str, nn.Parameter]]
ShapeOf = Callable[[nn.Parameter], torch.Size]
UPDATE = "update"  # kind of optimizer state that a `BoundOptimizer` keeps only during a step
_BLOCK = 4096  # number of squares that are summed in fp32 at a time


class MakeOptimizer(Protocol):
    """A function that builds the configured optimizer over the runner's parameters, after sharding.

    `shape_of` returns the full shape of a parameter, even if an engine replaces the parameter with a shard.
    """

    def __call__(self, parameters: NamedParameters, shape_of: ShapeOf = ...) -> torch.optim.Optimizer: ...


@runtime_checkable
class BoundOptimizer(Protocol):
    """An optimizer that gathers whole matrices from the ranks' shards; `Weights.matrices` selects the matrices."""

    def bind(self, shards: Callable[[], list[Shard]], group: Group, device: torch.device) -> None:
        """Set the function that returns this rank's shards of weights and updates, and the device for `step`.

        The ranks of `group` together hold the whole matrices, and call `step` together.
        """


def parameter_groups(
    parameters: NamedParameters,
    weight_decay: float,
    shape_of: ShapeOf = lambda p: p.shape,
    lr_scale: Callable[[str], float] = lambda name: 1.0,
    matrices: Mapping[str, str] = MappingProxyType({}),
) -> list[dict[str, Any]]:
    """Group the trainable parameters: weight decay applies to matrices, not to biases and norms.

    Parameters with fewer than two dimensions count as biases and norms. Parameters are also grouped by `lr_scale` and
    by element size, fp32 first. Parameters named in `matrices` are in separate groups that list the canonical names.
    """
    groups: dict[tuple[int, float, bool, bool], list[tuple[str, nn.Parameter]]] = {}
    for name, p in parameters:
        if p.requires_grad:
            matrix = name in matrices and len(shape_of(p)) in (2, 3)
            key = -p.element_size(), lr_scale(name), len(shape_of(p)) < 2, matrix
            groups.setdefault(key, []).append((name, p))
    result = []
    for (_, scale, vector, matrix), members in sorted(groups.items()):  # no two groups have the same key
        group: dict[str, Any] = {"params": [p for _, p in members], "weight_decay": 0.0 if vector else weight_decay}
        if scale != 1.0:
            group["lr_scale"] = scale
        if matrix:
            group["matrices"] = [matrices[name] for name, _ in members]
        result.append(group)
    return result


def optimizer_factory(config: Config, model: Model | None = None) -> MakeOptimizer:
    """Return a function that builds the configured optimizer from `model.named_parameters()` or this rank's shards."""
    make = registry.get("optimizer", config.run.optimizer.name)
    more: dict[str, Any] = {} if model is None else {"lr_scale": model.weights.lr_scale}
    if model is not None and isinstance(make, type) and issubclass(make, BoundOptimizer):
        more["matrices"] = {name: model.weights.canonical_name(name) for name in model.weights.matrices()}

    def build(parameters: NamedParameters, shape_of: ShapeOf = lambda p: p.shape) -> torch.optim.Optimizer:
        groups = parameter_groups(parameters, config.run.weight_decay, shape_of, **more)
        if not groups:
            raise ConfigError("the model has no trainable parameter: every parameter is frozen")
        try:
            # Callers set the learning rate before every step. If a caller forgets this, a rate of 0 shows the mistake.
            return make(groups, lr=0.0, options=config.run.optimizer.options)
        except (ValueError, TypeError) as error:  # the optimizer rejects the parameters or the options
            raise ConfigError(
                f"run.optimizer: {config.run.optimizer.name} rejects its parameters or options: {error}"
            ) from error

    return build


def create_state(optimizer: torch.optim.Optimizer) -> None:
    """Allocate the optimizer state now, without changing a parameter.

    Optimizers allocate their state in the first step. A checkpoint may be loaded before that step, and a saved
    checkpoint must be complete even if every step so far was skipped. A step with zero gradients and a learning rate of
    zero leaves the state at zero; the step count is reset. Raises ConfigError for state that does not start at zero,
    and for state in parameter groups, because checkpoints do not store such state.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    gradients = [p.grad for p in parameters]  # restored later, because an engine may keep its buffers in `grad`
    for p in parameters:
        p.grad = torch.zeros_like(p)
    settings = [{key: group[key] for key in group if key != "params"} for group in optimizer.param_groups]
    still = {"lr", "weight_decay"}  # set to zero; weight decay would change the momentum
    for group in optimizer.param_groups:
        group.update(dict.fromkeys(still & group.keys(), 0.0))
    optimizer.step()
    changed = set[str]()
    for group, kept in zip(optimizer.param_groups, settings, strict=True):
        changed |= {key for key in group.keys() - still - {"params"} if key not in kept or group[key] != kept[key]}
        group.update(kept)
    for p, gradient in zip(parameters, gradients, strict=True):
        p.grad = gradient
    if changed:
        raise ConfigError(
            f"run.optimizer: {type(optimizer).__name__} changes settings of its own during training "
            f"({', '.join(sorted(changed))}), which checkpoints do not store; use a different optimizer"
        )
    for state in optimizer.state.values():
        for key, value in state.items():
            if isinstance(value, Tensor):
                if key != "step" and value.count_nonzero():
                    raise ConfigError(
                        f"run.optimizer: {type(optimizer).__name__} keeps state ({key}) that does not start at zero, "
                        f"which checkpoints cannot restore before the first step; use a different optimizer"
                    )
                value.zero_()


def gradients_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return the gradients of an optimizer's parameters; a parameter that no micro batch used gets zeros.

    Engines that flatten parameters cannot leave a parameter out of a step. The other runners include all parameters
    too, so that all runners compute the same updates.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for p in parameters:
        if p.grad is None:
            p.grad = torch.zeros_like(p)
    return [p.grad for p in parameters if p.grad is not None]


def unscale_and_clip_(gradients: list[Tensor], norm: float, scale: float, limit: float | None) -> None:
    """Divide gradients by `scale`, and clip them. norm: their global norm after the division; limit: maximum norm."""
    factor = (min(1.0, limit / (norm + 1e-6)) if limit else 1.0) / scale
    if factor != 1.0:
        torch._foreach_mul_(gradients, factor)


def global_norm(tensors: list[Tensor]) -> float:
    """Return the 2-norm over all elements of all tensors; every DTensor counts once. Collective for DTensors.

    The sum is in float64, because runners must agree on the norm and on the clipping that depends on it.
    """
    groups: dict[Any, list[Tensor]] = {}
    for tensor in tensors:
        spread = (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else None
        groups.setdefault(spread, []).append(tensor.to_local() if isinstance(tensor, DTensor) else tensor)
    total = 0.0
    for spread, group in groups.items():
        square = _square(group)
        if spread is not None:
            mesh, placements = spread
            for dim in (n for n, placement in enumerate(placements) if not placement.is_replicate()):
                dist.all_reduce(square, group=mesh.get_group(dim))
        total += square.item()
    return total**0.5


def _square(tensors: list[Tensor]) -> Tensor:
    """Return the sum of squares of plain tensors on one device, as a float64 scalar."""
    if tensors[0].device.type != "cpu":
        return torch.stack(torch._foreach_norm(tensors)).double().square().sum()
    # On a CPU, torch accumulates a norm in fp32: the error is 1e-6 for 10^5 elements and 1e-3 for 10^7.
    total = torch.zeros((), dtype=torch.float64)
    for tensor in tensors:
        flat = tensor.reshape(-1)
        whole = flat.numel() - flat.numel() % _BLOCK
        total += torch.linalg.vector_norm(flat[:whole].view(-1, _BLOCK), dim=1).double().square().sum()
        total += torch.linalg.vector_norm(flat[whole:]).double().square()
    return total
