"""Sharded modules that compute with this rank's slices.

Parameters are DTensors, the arithmetic is local: a module's `forward` is replaced on the instance, and torch's
dispatcher has no more to do than in an ordinary module.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Self

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from crosstrain import ConfigError, Model, local_forward

from .collectives import Copy, Gather, Reduce, ReduceScatter, Split, Unsplit
from .plan import user_of
from .rng_tracker import RngTracker


def local(tensor: Tensor) -> Tensor:
    """This rank's slice; the tensor itself where it is not cut."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class TensorParallel:
    """The ranks that share every block, and the exchanges of activations between them.

    `splits_sequence`: outside of the cut matrices each rank has its part of the sequence (in training alone).
    """

    def __init__(self, group: dist.ProcessGroup, splits_sequence: bool, rng: RngTracker) -> None:
        self.group, self.splits_sequence, self.rng = group, splits_sequence, rng
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.has_dropout = True  # without it random numbers are left alone, and a block is one graph for torch.compile
        self._aside: Tensor | None = None

    def __deepcopy__(self, memo: Any) -> Self:
        return self

    def enter(self, x: Tensor) -> Tensor:
        """Input of column-parallel products: the same [batch, length, width] on every rank; or without a batch."""
        if x.ndim == 2:
            return self.enter(x[None])[0]
        return (Gather if self.splits_sequence else Copy).apply(x, self.group)

    def leave(self, x: Tensor) -> Tensor:
        """Sum of the ranks' row-parallel products."""
        if x.ndim == 2:
            return self.leave(x[None])[0]
        return (ReduceScatter if self.splits_sequence else Reduce).apply(x, self.group)

    def whole_sequence(self, x: Tensor) -> Tensor:
        """The whole sequence, for computations that every rank repeats."""
        return Unsplit.apply(x, self.group) if self.splits_sequence else x

    def set_aside(self, _module: nn.Module, _inputs: object, x: Tensor) -> Tensor:
        """Hook after the last module that sees a part of the sequence: `taken` gives that part to the head.

        The model's own forward goes on with a whole sequence, without memory, because it may look at the length.
        """
        if not self.splits_sequence:
            return x
        self._aside = x
        return x.new_zeros(()).expand(x.shape[0], x.shape[1] * self.size, x.shape[2])

    def taken(self, x: Tensor) -> Tensor:
        """The part that was set aside instead of `x`; `x` itself if none was."""
        aside, self._aside = self._aside, None
        return x if aside is None else aside

    def split_sequence(self, x: Tensor) -> Tensor:
        """This rank's part of the sequence; from here on dropout differs by rank."""
        if not self.splits_sequence:
            return x
        if x.shape[1] % self.size:
            raise ConfigError(
                f"run.runner.sequence_parallel: sequences of {x.shape[1]} tokens cannot be split for {self.size} "
                f"ranks; make the length divisible, or switch it off"
            )
        if self.has_dropout:
            self.rng.fork()
        return Split.apply(x, self.group)


class TPRegion:
    """Between the columns and the row of one parent module: each rank computes its own heads, or its own features.

    Columns that read the same input share its exchange. Where the sequence is split, the parent itself gets the whole
    one, because attention looks at its length; unless the parent is a block, of which other parts want to see theirs.

    Dropout differs by rank from the last column to the last row, which adapters may have behind the first.
    """

    def __init__(self, tensor: TensorParallel, model: Model, parent: nn.Module | None) -> None:
        self.tensor, self.model, self.entered_by_parent = tensor, model, parent is not None
        if parent is not None:
            parent.register_forward_pre_hook(self._enter_parent, with_kwargs=True)
            # A recomputation may end, by an exception, before the row.
            parent.register_forward_hook(lambda *_: self._entered.clear(), always_call=True)
        self.last_column: nn.Module | None = None
        self.last_row: nn.Module | None = None
        self._entered: list[tuple[Tensor, Tensor]] = []  # what columns were given, and as they multiply it

    def _enter_parent(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if not self.tensor.splits_sequence:
            return args, kwargs
        if args:
            return (self.tensor.enter(args[0]), *args[1:]), kwargs
        return args, kwargs | {"hidden_states": self.tensor.enter(kwargs["hidden_states"])}

    def _enter(self, x: Tensor) -> Tensor:
        if self.entered_by_parent and self.tensor.splits_sequence:
            return x
        for given, entered in self._entered:
            if given is x:
                return entered
        self._entered.append((x, self.tensor.enter(x)))
        return self._entered[-1][1]

    def _forks(self) -> bool:
        return self.tensor.has_dropout and self.model.training

    def column(self, module: nn.Module, x: Tensor) -> Tensor:
        y = _product(module, self._enter(x), module.bias)
        if module is self.last_column and self._forks() and not self.tensor.splits_sequence:
            self.tensor.rng.enter()  # for the dropout of attention, which comes after the projections
        return y

    def row(self, module: nn.Module, x: Tensor) -> Tensor:
        if module is self.last_row and self._forks():
            self.tensor.rng.leave()
        self._entered.clear()
        y = self.tensor.leave(_product(module, x, None))
        return y if module.bias is None else y + module.bias.to(y.dtype)  # half under autocast, as in one process


def _product(module: nn.Module, x: Tensor, bias: Tensor | None) -> Tensor:
    weight = local(module.weight)
    if isinstance(module, Conv1D):  # whose weight is [in, out]
        weight = weight.T
    return functional.linear(x, weight, None if bias is None else local(bias))


def _embed(tensor: TensorParallel, module: nn.Embedding, ids: Tensor) -> Tensor:
    """Embeddings of tokens, each from the rank that has its row."""
    weight = local(module.weight)
    ids = ids - tensor.rank * len(weight)
    elsewhere = (ids < 0) | (ids >= len(weight))
    padding = None if module.padding_idx is None else module.padding_idx - tensor.rank * len(weight)
    if padding is not None and not 0 <= padding < len(weight):
        padding = None
    x = functional.embedding(ids.masked_fill(elsewhere, 0), weight, padding)
    return Reduce.apply(x.masked_fill(elsewhere[..., None], 0.0), tensor.group)


def has_dropout(model: nn.Module) -> bool:
    """True if a module has a rate of dropout, or a number by such a name, above zero.

    transformers' attention keeps its rate in a number. One too many is found at no harm: a fork from which nothing is
    drawn leaves the random numbers as they are (`RngTracker.leave`), and costs a copy of the generator's state.
    """
    rates = [m.p for m in model.modules() if isinstance(m, nn.modules.dropout._DropoutNd)]
    rates += [value for m in model.modules() for name, value in vars(m).items() if "drop" in name.lower()]
    return any(isinstance(rate, float | int) and rate > 0 for rate in rates)


def _experts(tensor: TensorParallel, forward: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """Experts that compute their slice of features for the same tokens on every rank.

    inputs: hidden states, numbers of experts and their weights, which are gathered where the sequence is split. The
    gradients of weights are parts of a sum, as those of hidden states are.
    """
    return tensor.leave(forward(*map(tensor.enter, inputs)))


def compute_with_slices(model: Model, styles: dict[str, str], tensor: TensorParallel) -> None:
    """Make the modules named in `styles` compute with slices."""
    tensor.has_dropout = has_dropout(model)
    regions: dict[nn.Module, TPRegion] = {}
    blocks = set(model.blocks())
    for name, style in styles.items():
        module = model.get_submodule(name)
        if style == "vocabulary":
            if isinstance(module, nn.Embedding):  # a head's weight is used by `ParallelHead`
                module.forward = partial(_embed, tensor, module)
            continue
        if style == "experts":
            forward = vars(module).get("forward", partial(local_forward, module))  # which may send tokens to others
            module.forward = partial(_experts, tensor, forward)
            continue
        parent = model.get_submodule(user_of(model, name))
        if parent not in regions:
            regions[parent] = TPRegion(tensor, model, None if parent in blocks else parent)
        region = regions[parent]
        if style == "row":
            module.forward, region.last_row = partial(region.row, module), module
        else:
            module.forward, region.last_column = partial(region.column, module), module
