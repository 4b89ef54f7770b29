"""A rank's shards of parameters, optimizer state and gradients, as boxes of logical tensors."""

from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from crosstrain.checkpoint.boxes import RUNNER, Piece, Shard, dtensor_pieces, own_kind, shared_kind, whole_pieces
from crosstrain.distributed.group import Group
from crosstrain.engine.optimizer import UPDATE, BoundOptimizer, MakeOptimizer, NamedParameters, create_state
from crosstrain.utils.errors import CheckpointError, ConfigError, first_line

if TYPE_CHECKING:
    from crosstrain.engine.runner import Runner


class HeldState:
    """Describes the tensors of a rank, for checkpoints, comparisons and optimizers, without gathering them.

    The platform calls `shards` and `gradients`. The default methods support plain parameters and DTensors. If an engine
    stores parameters differently, its runner subclasses HeldState and overrides the small methods below. These methods
    take parameters, not names.

    equal: kinds of tensors that are equal in all teams, within `Runner.merged`; None: all kinds. A checkpoint stores
    one copy of a tensor of these kinds, and each team's copy of any other tensor.
    extra: kind -> parameter -> tensor of the runner, laid out like `weight`. These tensors are saved in checkpoints;
    other runners ignore them.
    stored: kinds of this rank's tensors that were loaded from a checkpoint; set before `Runner.loaded` is called.
    """

    def __init__(self, runner: "Runner") -> None:
        self.runner = runner
        self.equal: Collection[str] | None = None if runner.capabilities.exact else {"param"}
        self.extra: dict[str, dict[nn.Parameter, Tensor]] = {}
        self.stored: Collection[str] = ()

    def shards(self) -> list[Shard]:
        """Return this rank's shards of parameters and optimizer state.

        The shards share memory with the model's tensors, so loading into the shards restores the model. Persistent
        buffers are included, and quantized parameters are left out. Raises CheckpointError for optimizer state that is
        neither a scalar tensor nor shaped like its parameter.
        """
        out, model, optimizer = list[Shard](), self.runner.model, self.runner.optimizer
        quantized = model.weights.quantized()
        for name, parameter in model.weights.parameters().items():
            if name not in quantized:
                out += self._shards_of(name, parameter)
        for matrix, state in (optimizer.state if optimizer else {}).items():
            if isinstance(matrix, str):  # a `BoundOptimizer` keeps this state only on the rank that owns the matrix
                out += [_whole(self._kind(kind), matrix, value) for kind, value in state.items()]
        out += [_whole("param", name, buffer) for name, buffer in model.weights.buffers().items()]
        return out

    def _shards_of(self, name: str, parameter: nn.Parameter) -> Iterator[Shard]:
        held = self.weight(parameter)
        yield self._shard("param", name, parameter, held)
        extra = {RUNNER + kind: tensors[parameter] for kind, tensors in self.extra.items() if parameter in tensors}
        for kind, value in (self.state(parameter) | extra).items():
            if isinstance(value, Tensor) and value.shape == held.shape:
                yield self._shard(self._kind(kind), name, parameter, value)
            elif isinstance(value, Tensor) and value.ndim == 0:
                yield _whole(self._kind(kind), name, value)
            elif value is not None:
                raise CheckpointError(
                    f"optimizer {self.runner.run.optimizer.name} keeps {kind} of {name} as a {type(value).__name__}, "
                    f"but checkpoints store only scalar tensors and tensors of the parameter's shape; use a different "
                    f"optimizer"
                )

    def _shard(self, kind: str, name: str, parameter: nn.Parameter, held: Tensor) -> Shard:
        shape = self.runner.model.weights.logical_shape(name, self.full_shape(parameter))
        return Shard(kind, name, tuple(shape), self.pieces(parameter, held, shape))

    def _kind(self, kind: str) -> str:
        """Return the name of a kind in checkpoints. The name includes the team unless all teams have equal copies."""
        if self.equal is None or kind in self.equal or kind == UPDATE:
            return kind
        return own_kind(self.runner.team_number, kind)

    def was_loaded(self, extra: str) -> bool:
        """Return True if `extra[extra]` was loaded from a checkpoint."""
        return self._kind(RUNNER + extra) in self.stored

    def saved(self) -> list[Shard]:
        """Return the shards that this rank saves: the first team saves those that are equal in all teams."""
        return [s for s in self.shards() if not self.runner.team_number or shared_kind(s.kind) != s.kind]

    def apart(self) -> list[Shard]:
        """Return this rank's shards outside of `Runner.merged`, where each team of a runner has its own parameters."""
        shards, team = self.shards(), self.runner.team_number
        if self.runner.capabilities.exact:
            return shards
        return [replace(s, kind=own_kind(team, s.kind)) if s.kind == "param" else s for s in shards]

    def gradients(self) -> list[Shard]:
        """Return this rank's shards of the gradients, times `gradient_scale`; valid after `forward_backward`."""
        held = [(name, p, self.gradient(p)) for name, p in self.runner.model.weights.parameters().items()]
        return [self._shard("grad", name, p, gradient) for name, p, gradient in held if gradient is not None]

    def full_shape(self, parameter: nn.Parameter) -> torch.Size:
        """Shape of a parameter in the model as built, even if the engine replaces the parameter with a shard.

        The shape includes the vocabulary padding, but no padding that depends on the number of ranks.
        """
        return parameter.shape

    def weight(self, parameter: nn.Parameter) -> Tensor:
        """This rank's shard of a parameter."""
        return parameter

    def state(self, parameter: nn.Parameter) -> dict[str, Any]:
        """This rank's optimizer state for a parameter: name in the optimizer -> tensor, laid out like `weight`."""
        return self.runner.optimizer.state.get(parameter, {}) if self.runner.optimizer else {}

    def gradient(self, parameter: nn.Parameter) -> Tensor | None:
        """This rank's shard of a parameter's gradient, laid out like `weight`."""
        return parameter.grad

    def pieces(self, parameter: nn.Parameter, held: Tensor, shape: torch.Size) -> list[Piece]:
        """Pieces of `held` with boxes in the logical `shape`. `held`: this rank's shard of `parameter` or its state."""
        return dtensor_pieces(held, tuple(shape)) if isinstance(held, DTensor) else whole_pieces(held, tuple(shape))

    # ---- copies of weights

    def keep(self, kind: str) -> None:
        """Copy this rank's current weights of trainable parameters to `extra[kind]`."""
        trained = [p for p in self.runner.model.weights.parameters().values() if p.requires_grad]
        self.extra[kind] = {p: self.weight(p).detach().clone() for p in trained}

    @torch.no_grad()
    def swap(self, kind: str) -> None:
        """Swap this rank's weights with the copies in `extra[kind]`."""
        for parameter, kept in self.extra[kind].items():
            weight = self.weight(parameter).detach()
            now = weight.clone()
            weight.copy_(kept)
            kept.copy_(now)
        self.runner.loaded()

    # ---- the optimizer

    def build_optimizer(self, make_optimizer: MakeOptimizer | None) -> None:
        """Build the runner's optimizer over the current parameters, and allocate the optimizer state.

        Called by `Runner.prepare`. Does nothing if `make_optimizer` is None.
        """
        if make_optimizer is None:
            return
        self.runner.optimizer = self.bound(make_optimizer(self.trained(), self.full_shape))
        try:
            create_state(self.runner.optimizer)
        except RuntimeError as error:  # the parameters' tensor class lacks an operation
            name, reason = self.runner.run.optimizer.name, first_line(error)
            raise ConfigError(f"run.optimizer: {name} fails with this runner: {reason}") from error

    def bound(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Return the optimizer; a BoundOptimizer is first bound to this rank's shards. Collective."""
        if isinstance(optimizer, BoundOptimizer):
            optimizer.bind(self.shards, self.copies(), self.runner.device)
        return optimizer

    def trained(self) -> NamedParameters:
        """Parameters for the optimizer: the model's parameters, or this rank's shards of them."""
        return self.runner.model.named_parameters()

    def copies(self) -> Group:
        """Group of all ranks that hold copies or shards of the same parameters as this rank. Collective."""
        return self.runner.team


def _whole(kind: str, name: str, value: Tensor) -> Shard:
    return Shard(kind, name, tuple(value.shape), whole_pieces(value, tuple(value.shape)))
