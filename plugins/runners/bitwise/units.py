"""Sharded layers computed as a fixed number of products, so that the degree of tensor parallelism changes no bit.

A column-parallel layer of width D is D products whose results are concatenated; a row-parallel layer is the sum of D
products in a fixed binary tree. Each of them is a unit. Of t tensor-parallel ranks, each computes D / t consecutive
units; a rank without tensor parallelism computes all of them. Everything else of the model is computed by every rank,
the embedding, the head and experts included.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from crosstrain import ConfigError, Group, Model, derive_seed
from crosstrain.modeling.context import WithGroup, differentiable, same

from ..megatron.plan import Resolved, resolve, shard_specs, user_of
from ..megatron.tensor_parallel import TensorParallel, local, modules_on_parts, weight_of, with_hidden_states
from .partial_sums import PartialSums

_STYLES = ("column", "fused_qkv", "row")
_VECTOR = 64  # activations of a unit must be a multiple; vector instructions treat the rest differently


def plan_of_units(model: Model, over: dict[str, str]) -> Resolved:
    """Return the plan's column-parallel and row-parallel layers."""
    plan = resolve(model, over)
    plan.modules = {name: style for name, style in plan.modules.items() if style in _STYLES}
    return plan


def check_units(model: Model, over: dict[str, str], width: int) -> None:
    """Raise ConfigError if the sharded layers of a model cannot be computed in `width` units."""
    plan = plan_of_units(model, over)
    if plan.summed:
        raise ConfigError(
            f"run.bitwise.width: each unit would have a part of the gradient of {min(plan.summed)}; leave width out"
        )
    try:
        shard_specs(model, plan, width)
    except ConfigError as error:
        raise ConfigError(f"run.bitwise.width: {str(error).partition(': ')[2]}") from None
    users = (user_of(model, name) for name in plan.modules)
    check_rates(model, users, "width", "only dropout of attention and of adapters can be drawn for each unit")


def check_rates(model: Model, names: Iterable[str], option: str, reason: str) -> None:
    """Raise ConfigError if a module keeps a dropout rate, other than that of attention, as a plain attribute."""
    for name in names:
        for key, rate in _rates(model.get_submodule(name)).items():
            if "att" not in key:
                raise ConfigError(
                    f"run.bitwise.{option}: {model.weights.canonical_name(name)}.{key} is {rate:g}, but {reason}; set "
                    f"it to 0"
                )


def check_sequence(model: Model, over: dict[str, str]) -> None:
    """Raise ConfigError if a module with sharded layers has further parameters, such as those of adapters.

    Their gradients would be sums over parts of the sequence.
    """
    plan = plan_of_units(model, over)
    users = tuple(f"{user_of(model, name)}." for name in plan.modules)
    for name, parameter in model.named_parameters():
        if name.startswith(users) and name.rpartition(".")[0] not in plan.modules and parameter.requires_grad:
            raise ConfigError(
                f"run.bitwise: with sequence_parallel, {model.weights.canonical_name(name)} would be applied to a part "
                f"of the sequence; leave sequence_parallel out"
            )


def _rates(module: nn.Module) -> dict[str, float]:
    """Return the dropout rates above zero that a module keeps as plain attributes."""
    return {key: rate for key, rate in vars(module).items() if "drop" in key and isinstance(rate, float) and rate}


def check_vectors(unit: Tensor, option: str) -> None:
    """Raise ConfigError unless a unit's activations fill whole vectors, because their gradients depend on it."""
    if torch.is_grad_enabled() and unit.numel() % _VECTOR:
        raise ConfigError(
            f"run.bitwise.{option}: a part has {unit.numel()} activations, which is no multiple of {_VECTOR}; use a "
            f"smaller number"
        )


def _dropouts_of(model: Model, name: str) -> list[nn.Dropout]:
    """Return the dropout modules that an adapter added to a linear layer, whose sharded input they see."""
    user = user_of(model, name)
    layer = model.get_submodule(f"{user}.{name[len(user) + 1 :].partition('.')[0]}")
    return [module for module in layer.modules() if isinstance(module, nn.Dropout)]


class Enter(torch.autograd.Function):
    """Forward: a view for each unit. Backward: the sum of the units' gradients over all ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, count: int, group: dist.ProcessGroup | None) -> tuple[Tensor, ...]:
        ctx.group = group
        return tuple(x.view_as(x) for _ in range(count))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return _total([gradient.clone() for gradient in gradients], ctx.group), None, None


class Leave(torch.autograd.Function):
    """Forward: the sum of the units' results over all ranks. Backward: identity."""

    @staticmethod
    def forward(ctx: Any, group: dist.ProcessGroup | None, *products: Tensor) -> Tensor:
        ctx.count = len(products)
        return _total([product.clone() for product in products], group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return None, *[gradient] * ctx.count


# Forward: identity. Backward: contiguous memory, because products of strided matrices may differ in rounding.
Contiguous = differentiable(same, lambda gradient, _: gradient.contiguous())


def _whole(tensor: TensorParallel, module: nn.Module, forward: Callable[..., Tensor], x: Tensor) -> Tensor:
    """Call a module's forward with the whole sequence, and return this rank's part of the result.

    A module without submodules, such as a norm, is recomputed in the backward, so that only parts are kept.
    """

    def compute(part: Tensor) -> Tensor:
        return tensor.split_sequence(forward(tensor.whole_sequence(part)))

    if tensor.splits_sequence and torch.is_grad_enabled() and not [*module.children()]:
        return checkpoint(compute, x, use_reentrant=False)
    return compute(x)


def _total(parts: Sequence[Tensor], group: dist.ProcessGroup | None) -> Tensor:
    """Return the sum over the units of all ranks in a fixed tree; overwrites `parts`."""
    sums = PartialSums()
    for leaf, part in enumerate(parts):
        sums.add((0, leaf), part)
    total = sums.total()
    assert total is not None
    if group is not None:
        dist.all_reduce(total, group=group)  # the backend sums in a tree over the ranks
    return total


class Draws:
    """Random numbers of consecutive parts, from part `first` on; they do not depend on the rank that draws them."""

    def __init__(self, count: int, first: int) -> None:
        self.count, self.first = count, first
        self._attended = False  # attention in this forward drew its dropout for each part

    def apart(self) -> Iterator[int]:
        """Yield the index of each part; random numbers drawn meanwhile are the part's own."""
        seed = int(torch.randint(2**62, ()))  # every rank draws the same number
        for index in range(self.count):
            with torch.random.fork_rng():
                torch.manual_seed(derive_seed(seed, self.first + index))
                yield index

    def of_attention(self, model: Model, modules: Iterable[nn.Module]) -> None:
        """Make attention draw its dropout for parts of the heads, if one of these modules has such dropout."""
        for module in modules:
            dropped = [
                child.p for key, child in module.named_children() if isinstance(child, nn.Dropout) and "att" in key
            ]
            if _rates(module) or any(dropped):
                model.register_forward_pre_hook(self._pass_heads, with_kwargs=True)
                model.register_forward_hook(self._check_heads)
                return

    def _pass_heads(self, model: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Pre-hook that passes `by_heads` to the attention functions."""
        self._attended = False
        return inputs, named | {"by_heads": self._attend}

    def _check_heads(self, model: nn.Module, inputs: Any, output: Any) -> None:
        if model.training and not self._attended:
            raise ConfigError(
                "run.bitwise: this model's attention cannot draw dropout for groups of heads; set its rate to 0"
            )

    def _attend(self, compute: Callable[..., Any], query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, None]:
        """Compute attention for each part of the heads; query, key and value are [batch, heads, length, width]."""
        self._attended = True
        if key.shape[1] % self.count:
            raise ConfigError(
                f"run.bitwise: dropout cannot be drawn for {self.count} groups of {key.shape[1]} key heads; set its "
                f"rate to 0"
            )
        parts = list(zip(*(x.chunk(self.count, 1) for x in (query, key, value)), strict=True))
        outputs = [compute(*map(Tensor.contiguous, parts[index]))[0] for index in self.apart()]
        return torch.cat([Contiguous.apply(output, None) for output in outputs], 2), None


class Units(WithGroup):
    """The `count` units of this rank. tensor: the tensor-parallel ranks, whose backend sums in a tree; None: one rank.

    context: the context-parallel ranks, each of which computes attention for the heads of some of the units.
    If these ranks split the sequence, each keeps its part of the activations, but modules compute with the whole
    sequence: gradients of norms and biases are sums over the sequence, and products of fewer rows round differently.
    """

    def __init__(self, count: int, context: Group, tensor: TensorParallel | None = None) -> None:
        self.count, self.tensor = count, tensor
        self.group, first = (None, 0) if tensor is None else (tensor.group, tensor.rank * count)
        self.draws, heads = Draws(count, first), count // context.size
        self.heads = Draws(heads, first + context.rank * heads)
        self._inside = False  # between a column-parallel layer and its row-parallel layer

    def compute(self, model: Model, plan: Resolved) -> None:
        """Make a model's sharded layers, and dropout between them, compute with units."""
        for name, style in plan.modules.items():
            module = model.get_submodule(name)
            if style == "row":
                module.forward = partial(self._row, module)
                for dropout in _dropouts_of(model, name):
                    dropout.forward = partial(self._drop, dropout)
            else:
                module.forward = partial(self._column, module, 3 if style == "fused_qkv" else 1)
        users = {model.get_submodule(user_of(model, name)) for name in plan.modules}
        if self.tensor is not None and self.tensor.splits_sequence:
            self._on_parts(model, users)
        for user in users:
            for dropout in user.children():
                if isinstance(dropout, nn.Dropout):
                    dropout.forward = partial(self._drop_inside, dropout, dropout.forward)
        self.heads.of_attention(model, users)

    def _on_parts(self, model: Model, users: set[nn.Module]) -> None:
        """Make the modules in and after the blocks compute with whole sequences; `users` have sharded layers."""
        assert self.tensor is not None
        whole = self.tensor.whole_sequence
        found = modules_on_parts(model)
        for module in found:
            if module in users:
                module.register_forward_pre_hook(lambda _, *given: with_hidden_states(whole, *given), with_kwargs=True)
                found += [child for child in module.children() if isinstance(child, nn.Dropout)]
            elif users & {*module.modules()}:
                found += module.children()
            else:
                module.forward = partial(_whole, self.tensor, module, module.forward)

    def _drop(self, module: nn.Dropout, x: Tensor) -> Tensor:
        """Apply dropout to activations that are sharded in their last dimension."""
        if not (module.training and module.p):
            return x
        units = x.unflatten(-1, (self.count, -1)).unbind(-2)
        outputs = [functional.dropout(units[index].contiguous(), module.p) for index in self.draws.apart()]
        return torch.stack(outputs, -2).flatten(-2)

    def _drop_inside(self, module: nn.Dropout, whole: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Apply dropout of a module with sharded layers; `whole` is for activations that are not sharded."""
        return self._drop(module, x) if self._inside else whole(x)

    def _column(self, module: nn.Module, parts: int, x: Tensor) -> Tensor:
        """Compute a column-parallel layer with `parts` matrices in one weight, such as queries, keys and values."""
        self._inside = True
        weights = self._rows(weight_of(module), parts)
        biases = self._rows(local(module.bias), parts) if module.bias is not None else [None] * self.count
        inputs = Enter.apply(x, self.count, self.group)
        outputs = [functional.linear(*unit) for unit in zip(inputs, weights, biases, strict=True)]
        outputs = [Contiguous.apply(output, None) for output in outputs]
        check_vectors(outputs[0], "width")
        return torch.stack(outputs, -2).unflatten(-1, (parts, -1)).transpose(-2, -3).flatten(-3)

    def _row(self, module: nn.Module, x: Tensor) -> Tensor:
        self._inside = False
        weights = weight_of(module).unflatten(1, (self.count, -1)).unbind(1)
        inputs = x.unflatten(-1, (self.count, -1)).unbind(-2)
        products = [functional.linear(x.contiguous(), w.contiguous()) for x, w in zip(inputs, weights, strict=True)]
        y = Leave.apply(self.group, *products)
        if module.bias is not None:
            y = y + module.bias.to(y.dtype)  # y has half precision under autocast
        return y if self.tensor is None else self.tensor.split_sequence(y)

    def _rows(self, tensor: Tensor, parts: int) -> list[Tensor]:
        """Return each unit's rows of a weight or bias of `parts` parts."""
        units = tensor.unflatten(0, (parts, self.count, -1)).transpose(0, 1).flatten(1, 2)
        return [unit.contiguous() for unit in units.unbind()]
