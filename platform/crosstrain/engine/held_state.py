"""A rank's part of a run's state: parameters, optimizer state and gradients, as boxes of logical tensors."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from crosstrain.checkpoint.boxes import RUNNER, Piece, Shard, dtensor_pieces, own_kind, whole_pieces
from crosstrain.distributed.group import Group
from crosstrain.engine.matrix_optimizer import UPDATE, MatrixOptimizer
from crosstrain.engine.optimizer import MakeOptimizer, NamedParameters, create_state
from crosstrain.utils.errors import CheckpointError, ConfigError, first_line

if TYPE_CHECKING:
    from crosstrain.engine.runner import Runner

REFERENCE = "reference"  # kind of the weights that training began with, for an objective that compares with them


class HeldState:
    """Describes what a runner's rank holds, for checkpoints, comparisons and optimizers. Nothing is gathered.

    The platform calls `shards` and `gradients`. A runner whose engine keeps other memory than the model's parameters,
    whole or as DTensors, makes a subclass that overrides the small methods after them. These know nothing of names.

    equal: kinds of tensors that are equal on all ranks that hold the same box, once `Runner.synchronize` was called;
    None: all kinds. A checkpoint has one copy of these and every rank's own copy of all other kinds.
    extra: the runner's own tensors by kind and parameter, laid out as `weight`. Checkpoints keep them, and other
    runners leave them behind.
    """

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self.equal: Collection[str] | None = None if runner.capabilities.exact else {"param"}
        self.extra: dict[str, dict[nn.Parameter, Tensor]] = {}

    def shards(self) -> list[Shard]:
        """This rank's part of parameters and optimizer state, in live memory: reading it saves, writing to it loads.

        Persistent buffers are among the parameters, a model's `quantized` ones are not. Raises CheckpointError for
        optimizer state that is neither shaped like its parameter nor a scalar tensor.
        """
        out, model, optimizer = list[Shard](), self.runner.model, self.runner.optimizer
        quantized = model.weights.quantized()
        for name, parameter in model.weights.parameters().items():
            if name not in quantized:
                out += self._shards_of(name, parameter)
        for matrix, state in (optimizer.state if optimizer else {}).items():
            if isinstance(matrix, str):  # a `MatrixOptimizer` keeps it on this rank only
                out += [_whole(self._kind(kind), matrix, value) for kind, value in state.items()]
        out += [_whole("param", name, buffer) for name, buffer in model.weights.buffers().items()]
        return out

    def _shards_of(self, name: str, parameter: nn.Parameter) -> Iterator[Shard]:
        shape = self.runner.model.weights.logical_shape(name, self.full_shape(parameter))
        held = self.weight(parameter)
        yield Shard("param", name, tuple(shape), self.pieces(parameter, held, shape))
        extra = {RUNNER + kind: tensors[parameter] for kind, tensors in self.extra.items() if parameter in tensors}
        for kind, value in (self.state(parameter) | extra).items():
            if isinstance(value, Tensor) and value.shape == held.shape:
                yield Shard(self._kind(kind), name, tuple(shape), self.pieces(parameter, value, shape))
            elif isinstance(value, Tensor) and value.ndim == 0:
                yield _whole(self._kind(kind), name, value)
            elif value is not None:
                raise CheckpointError(
                    f"optimizer {self.runner.run.optimizer.name} keeps {kind} of {name} as a {type(value).__name__}, "
                    f"and checkpoints hold tensors of the parameter's shape and scalar ones; use another optimizer"
                )

    def _kind(self, kind: str) -> str:
        """Name of a kind of state in checkpoints: with the rank's number unless ranks have equal copies."""
        if self.equal is None or kind in self.equal or kind == UPDATE:
            return kind
        return own_kind(self.runner.world.rank, kind)

    def gradients(self) -> list[Shard]:
        """This rank's part of the gradients, times `gradient_scale`; valid after `forward_backward`."""
        out = []
        for name, parameter in self.runner.model.weights.parameters().items():
            gradient = self.gradient(parameter)
            if gradient is not None:
                shape = self.runner.model.weights.logical_shape(name, self.full_shape(parameter))
                out.append(Shard("grad", name, tuple(shape), self.pieces(parameter, gradient, shape)))
        return out

    def full_shape(self, parameter: nn.Parameter) -> torch.Size:
        """Shape of a parameter with padding, also where an engine keeps something else in its place."""
        return parameter.shape

    def weight(self, parameter: nn.Parameter) -> Tensor:
        """Memory of this rank's part of a parameter."""
        return parameter

    def state(self, parameter: nn.Parameter) -> dict[str, Any]:
        """This rank's optimizer state of a parameter, by the optimizer's names, laid out as `weight` is."""
        return self.runner.optimizer.state.get(parameter, {}) if self.runner.optimizer else {}

    def gradient(self, parameter: nn.Parameter) -> Tensor | None:
        """This rank's part of a parameter's gradient, laid out as `weight` is."""
        return parameter.grad

    def pieces(self, parameter: nn.Parameter, held: Tensor, shape: torch.Size) -> list[Piece]:
        """Boxes in the logical `shape` of `held`: this rank's part of `parameter` or of a tensor shaped like it."""
        return dtensor_pieces(held, tuple(shape)) if isinstance(held, DTensor) else whole_pieces(held, tuple(shape))

    # ---- copies of weights

    def keep(self, kind: str) -> None:
        """Copy this rank's present weights, of parameters that train, into tensors of its own, `extra[kind]`."""
        trained = [p for p in self.runner.model.weights.parameters().values() if p.requires_grad]
        self.extra[kind] = {p: self.weight(p).detach().clone() for p in trained}

    @torch.no_grad()
    def swap(self, kind: str) -> None:
        """Exchange this rank's weights for those of `extra[kind]`."""
        for parameter, kept in self.extra[kind].items():
            weight = self.weight(parameter).detach()
            now = weight.clone()
            weight.copy_(kept)
            kept.copy_(now)
        self.runner.loaded()

    # ---- the optimizer of what is held

    def build_optimizer(self, make_optimizer: MakeOptimizer | None) -> None:
        """Give the runner its optimizer over the parameters as they are now, with its state allocated; None for None.

        For `Runner.prepare`.
        """
        if make_optimizer is None:
            return
        self.runner.optimizer = self.bound(make_optimizer(self.trained(), self.full_shape))
        try:
            create_state(self.runner.optimizer)
        except RuntimeError as error:  # an operation that the parameters' kind of tensor does not have
            name, reason = self.runner.run.optimizer.name, first_line(error)
            raise ConfigError(f"run.optimizer: {name} fails under this runner: {reason}") from error

    def bound(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """The optimizer, told where the parts of whole matrices are if it needs them. Collective."""
        if isinstance(optimizer, MatrixOptimizer):
            optimizer.bind(self.shards, self.copies(), self.runner.device)
        return optimizer

    def trained(self) -> NamedParameters:
        """Parameters for the optimizer: the model's, or this rank's shards."""
        return self.runner.model.named_parameters()

    def copies(self) -> Group:
        """The ranks that hold equal copies or parts of this rank's parameters. Collective."""
        return self.runner.world if self.equal is None else Group()


def _whole(kind: str, name: str, value: Tensor) -> Shard:
    return Shard(kind, name, tuple(value.shape), whole_pieces(value, tuple(value.shape)))
