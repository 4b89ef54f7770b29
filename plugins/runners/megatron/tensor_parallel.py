"""Shard a model for tensor parallelism: its modules compute with this rank's slices of their parameters.

Parameters are DTensors, but the arithmetic is local: `forward` is replaced on the module instance and uses plain
tensors, so there is no DTensor dispatch overhead.

In the backward, the transpose of each collective runs. These pairs of collectives are taken from Megatron-LM (Shoeybi
et al., 2019; Korthikanti et al., 2022). Activations are [batch, length, width]. The code calls the collectives of
torch.distributed, so that the watchdog can monitor them.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from crosstrain import ConfigError, ForwardMode, Head, Logits, Model, token_cross_entropy
from crosstrain.modeling.context import (
    Context,
    Gather,
    Reduce,
    WithGroup,
    differentiable,
    gathered,
    joined,
    same,
    scatter_sum,
    summed,
)
from crosstrain.modeling.meta_init import replace_parameters

from .expert_parallel import local_forward
from .float8 import float8_product, in_float8
from .plan import Resolved, ShardSpec, ends_of, shard_specs, user_of
from .rng_tracker import RngTracker


def _part(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[batch, length, width] -> this rank's [batch, part, width]."""
    part = x.shape[1] // dist.get_world_size(group)
    return x.narrow(1, dist.get_rank(group) * part, part).contiguous()


# Forward: identity. Backward: sum over the ranks, because each rank used its copy differently.
Copy = differentiable(same, summed)
# Forward: sum over the ranks, and each rank keeps its part of the sequence. Backward: gather.
ReduceScatter = differentiable(scatter_sum, joined)
# Forward: this rank's part of a sequence that all ranks hold. Backward: gather.
Split = differentiable(_part, joined)
# Forward: gather the parts of a sequence. Backward: this rank's part, because gradients are equal on all ranks.
Unsplit = differentiable(joined, _part)


def local(tensor: Tensor) -> Tensor:
    """Return this rank's slice; the tensor itself if it is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def with_hidden_states(
    change: Callable[[Tensor], Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a module's arguments, with `change` applied to the hidden states: the first argument, or a named one."""
    if args:
        return (change(args[0]), *args[1:]), kwargs
    return args, kwargs | {"hidden_states": change(kwargs["hidden_states"])}


class TensorParallel(WithGroup):
    """The tensor-parallel ranks, and their collectives on activations.

    splits_sequence: True: outside of the sharded matrices, each rank holds a part of the sequence. False in evaluation.
    """

    def __init__(self, group: dist.ProcessGroup, splits_sequence: bool, rng: RngTracker) -> None:
        self.group, self.splits_sequence, self.rng = group, splits_sequence, rng
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.has_dropout = True  # False: no RNG forks, so that torch.compile captures a block as one graph
        self._aside: Tensor | None = None

    def compute(self, model: Model, plan: Resolved) -> None:
        """Make the modules of a plan compute with this rank's slices."""
        self.has_dropout = has_dropout(model)
        regions: dict[nn.Module, TPRegion] = {}
        blocks = set(model.structure.decoder_blocks())
        for name, style in plan.modules.items():
            module = model.get_submodule(name)
            if style == "vocabulary":
                if isinstance(module, nn.Embedding):  # a head's forward is not replaced: `ParallelHead` uses its weight
                    module.forward = partial(_embed, self, module)
                continue
            if style == "experts":
                # Expert parallelism may have replaced the forward.
                module.forward = partial(_experts, self, vars(module).get("forward", partial(local_forward, module)))
                continue
            parent = model.get_submodule(user_of(model, name))
            if parent not in regions:
                regions[parent] = TPRegion(self, model, None if parent in blocks else parent)
            region = regions[parent]
            if style == "row":
                module.forward, region.last_row = partial(region.row, module), module
            else:
                module.forward, region.last_column = partial(region.column, module), module
        for routers in model.structure.routers() if self.splits_sequence else []:
            routers.parts = Context(self.group)

    def enter(self, x: Tensor) -> Tensor:
        """Return the input of column-parallel layers, equal on all ranks: [batch, length, width] or [length, width]."""
        if x.ndim == 2:
            return self.enter(x[None])[0]
        return (Gather if self.splits_sequence else Copy).apply(x, self.group)

    def leave(self, x: Tensor) -> Tensor:
        """Return the sum of the ranks' row-parallel outputs; if the sequence is split, only this rank's part of it."""
        if x.ndim == 2:
            return self.leave(x[None])[0]
        return (ReduceScatter if self.splits_sequence else Reduce).apply(x, self.group)

    def whole_sequence(self, x: Tensor) -> Tensor:
        """Return the full sequence, for computations that every rank repeats."""
        return Unsplit.apply(x, self.group) if self.splits_sequence else x

    def set_aside(self, _module: nn.Module, _inputs: object, x: Tensor) -> Tensor:
        """Forward hook of the last module that runs on a part of the sequence: keep that part for `taken`.

        The model's forward may read the sequence length from its hidden states, so it continues with a full-length
        tensor that takes no memory.
        """
        if not self.splits_sequence:
            return x
        self._aside = x
        return x.new_zeros(()).expand(x.shape[0], x.shape[1] * self.size, x.shape[2])

    def taken(self, x: Tensor) -> Tensor:
        """Return the part that `set_aside` kept; without such a part, return `x`."""
        aside, self._aside = self._aside, None
        return x if aside is None else aside

    def split_sequence(self, x: Tensor) -> Tensor:
        """Return this rank's part of the sequence. From here on, each rank draws its own dropout mask."""
        if not self.splits_sequence:
            return x
        if x.shape[1] % self.size:
            raise ConfigError(
                f"run.runner.sequence_parallel: sequences of {x.shape[1]} tokens cannot be split evenly across "
                f"{self.size} ranks; make the length divisible, or turn sequence_parallel off"
            )
        if self.has_dropout:
            self.rng.fork()
        return Split.apply(x, self.group)

    def hook(self, model: Model, first: nn.Module | None, last: nn.Module | None) -> None:
        """Make the blocks from `first` to `last` run on this rank's part of the sequence.

        first: the block whose input is split; None: the stage's input is split already. last: the last block of the
        stage; None in the last stage, where the modules after the blocks, except the head, run on a part too.
        """
        if first is not None:
            first.register_forward_pre_hook(lambda _, x: (self.split_sequence(x[0]), *x[1:]), prepend=True)
        if last is None:
            last = modules_on_parts(model)[-1]
        last.register_forward_hook(self.set_aside)


def modules_on_parts(model: Model) -> list[nn.Module]:
    """Return the modules that sequence parallelism runs on parts of the sequence: the blocks, and all after them.

    The head is left out, because it gets its input from `TensorParallel.taken`.
    """
    closing = ends_of(model, "sequence_parallel").last[:-1]
    return [*model.structure.decoder_blocks(), *map(model.get_submodule, closing)]


class TPRegion:
    """The column-parallel and row-parallel layers of one parent: each rank computes its own heads or features.

    Column-parallel layers with the same input share one collective. If the sequence is split, the input of the parent
    is gathered, because attention modules derive the sequence length from their input. If the parent is a block, only
    the inputs of its column-parallel layers are gathered, because its other modules run on a part of the sequence.

    Between the last column-parallel and the last row-parallel layer, each rank draws its own dropout mask. There may be
    several layers of each kind, because adapters add layers.
    """

    def __init__(self, tensor: TensorParallel, model: Model, parent: nn.Module | None) -> None:
        self.tensor, self.model, self.entered_by_parent = tensor, model, parent is not None
        if parent is not None:
            parent.register_forward_pre_hook(self._enter_parent, with_kwargs=True)
            # Gradient checkpointing may stop a recomputation with an exception before the row-parallel layer.
            parent.register_forward_hook(lambda *_: self._entered.clear(), always_call=True)
        self.last_column: nn.Module | None = None
        self.last_row: nn.Module | None = None
        self._entered: list[tuple[Tensor, Tensor]] = []  # (input of column-parallel layers, the same after `enter`)

    def _enter_parent(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return with_hidden_states(self.tensor.enter, args, kwargs) if self.tensor.splits_sequence else (args, kwargs)

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
        y = self._product(module, self._enter(x), module.bias)
        if module is self.last_column and self._forks() and not self.tensor.splits_sequence:
            self.tensor.rng.enter()  # attention dropout comes after the projections
        return y

    def row(self, module: nn.Module, x: Tensor) -> Tensor:
        if module is self.last_row and self._forks():
            self.tensor.rng.leave()
        self._entered.clear()
        y = self.tensor.leave(self._product(module, x, None))
        return y if module.bias is None else y + module.bias.to(y.dtype)  # y has half precision under autocast

    def _product(self, module: nn.Module, x: Tensor, bias: Tensor | None) -> Tensor:
        weight, bias = weight_of(module), None if bias is None else local(bias)
        if not in_float8(module):
            return functional.linear(x, weight, bias)
        y = float8_product(module, x, weight, self.tensor.group)
        return y if bias is None else y + bias.to(y.dtype)


def weight_of(module: nn.Module) -> Tensor:
    """Return this rank's weight as [out, in]."""
    weight = local(module.weight)
    return weight.T if isinstance(module, Conv1D) else weight  # Conv1D weights are [in, out]


def _embed(tensor: TensorParallel, module: nn.Embedding, ids: Tensor) -> Tensor:
    """Return the embeddings of tokens; each row comes from the rank that holds it."""
    weight = local(module.weight)
    ids = ids - tensor.rank * len(weight)
    elsewhere = (ids < 0) | (ids >= len(weight))
    padding = None if module.padding_idx is None else module.padding_idx - tensor.rank * len(weight)
    if padding is not None and not 0 <= padding < len(weight):
        padding = None
    x = functional.embedding(ids.masked_fill(elsewhere, 0), weight, padding)
    return Reduce.apply(x.masked_fill(elsewhere[..., None], 0.0), tensor.group)


def has_dropout(model: nn.Module) -> bool:
    """Return True if a dropout module's rate, or a module's numeric attribute with "drop" in its name, is above zero.

    Attention modules in transformers keep their dropout rate in a numeric attribute. A false positive is harmless: a
    fork without draws leaves the random numbers unchanged (`RngTracker.leave`), and costs a copy of the generator's
    state.
    """
    rates = [m.p for m in model.modules() if isinstance(m, nn.modules.dropout._DropoutNd)]
    rates += [value for m in model.modules() for name, value in vars(m).items() if "drop" in name.lower()]
    return any(isinstance(rate, float | int) and rate > 0 for rate in rates)


def _experts(tensor: TensorParallel, forward: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """Compute this rank's slice of the experts' features; every rank computes the same tokens.

    inputs: hidden states, expert indices and routing weights. All inputs are gathered if the sequence is split. The
    gradients of routing weights are summed over the ranks, like the gradients of hidden states.
    """
    return tensor.leave(forward(*map(tensor.enter, inputs)))


def shard_model(model: Model, plan: Resolved, tensor: TensorParallel, mesh: DeviceMesh | None) -> dict[str, ShardSpec]:
    """Replace parameters of a model on the meta device with this rank's slices, and make the modules compute with them.

    The slices are DTensors on `mesh`, or plain tensors without a mesh. Returns parameter name -> shard spec. Raises
    ConfigError as `shard_specs` does.
    """
    names = {parameter: name for name, parameter in model.named_parameters()}
    cuts: dict[str, ShardSpec] = {}
    slices: dict[nn.Parameter, nn.Parameter] = {}
    for (module_name, attribute), cut in shard_specs(model, plan, tensor.size).items():
        parameter = model.get_submodule(module_name).get_parameter(attribute)
        cuts[names[parameter]] = cut
        mine = torch.empty(cut.local, dtype=parameter.dtype, device="meta")
        if mesh is not None:
            whole = torch.empty(cut.full, device="meta")
            mine = DTensor.from_local(
                mine, mesh, [cut.placement], run_check=False, shape=whole.shape, stride=whole.stride()
            )
        slices[parameter] = nn.Parameter(mine, requires_grad=parameter.requires_grad)
    replace_parameters(model, slices)
    for module_name, attribute in plan.attributes:
        owner = model.get_submodule(module_name)
        setattr(owner, attribute, getattr(owner, attribute) // tensor.size)
    tensor.compute(model, plan)
    return cuts


class ParallelHead(Head):
    """The head for ranks that hold parts of the vocabulary or of the sequence; losses need no gathered logits."""

    def __init__(self, tensor: TensorParallel, has_slice: bool = False) -> None:
        """has_slice: the weight is a slice of the vocabulary even if it is not a DTensor, as in a memory plan."""
        self.tensor, self.has_slice = tensor, has_slice

    def __call__(
        self,
        hidden: Tensor,
        weight: Tensor | None,
        labels: Tensor | None,
        vocab_size: int,
        logits: Logits,
        mode: ForwardMode,
    ) -> Tensor:
        hidden = self.tensor.taken(hidden)
        if weight is None or not (self.has_slice or isinstance(weight, DTensor)):
            return super().__call__(self.tensor.whole_sequence(hidden), weight, labels, vocab_size, logits, mode)
        if logits.bias is not None:
            logits = replace(logits, bias=local(logits.bias))
        if labels is not None:
            return token_cross_entropy(
                self.tensor.enter(hidden),
                local(weight),
                labels,
                vocab_size=vocab_size,
                group=self.tensor.group,
                logits=logits,
                **mode.of_loss(),
            )
        mine = functional.linear(hidden[:, -1], local(weight)).float()
        logits.apply_(mine)
        return gathered(mine, self.tensor.group).transpose(0, 1).reshape(len(mine), -1)[:, :vocab_size]
