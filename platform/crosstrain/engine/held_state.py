"""A rank's part of a run's state: parameters, optimizer state and gradients, as boxes of logical tensors."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from crosstrain.checkpoint.boxes import Piece, Shard, dtensor_pieces, whole_pieces
from crosstrain.config.run_options import RunOptions
from crosstrain.modeling.base import Model
from crosstrain.utils.errors import CheckpointError


class HeldState:
    """The part of a runner that describes what its rank holds, for checkpoints and comparisons. Nothing is gathered.

    The platform calls `shards`, `gradients` and `loaded`. A runner whose engine keeps other memory than the model's
    parameters, whole or as DTensors, overrides the small methods after them, which know nothing of names.
    """

    run: RunOptions
    model: Model
    optimizer: torch.optim.Optimizer | None = None

    def shards(self) -> list[Shard]:
        """This rank's part of parameters and optimizer state, in live memory: reading it saves, writing to it loads.

        Persistent buffers are among the parameters, a model's `quantized` ones are not. Raises CheckpointError for
        optimizer state that is neither shaped like its parameter nor a scalar tensor.
        """
        out, quantized = [], self.model.weights.quantized()
        for name, parameter in self.model.weights.parameters().items():
            if name in quantized:
                continue
            shape = self.model.weights.logical_shape(name, self.full_shape(parameter))
            held = self.held(parameter)
            out.append(Shard("param", name, tuple(shape), self.pieces(parameter, held, shape)))
            for key, value in self.held_state(parameter).items():
                if isinstance(value, Tensor) and value.shape == held.shape:
                    out.append(Shard(key, name, tuple(shape), self.pieces(parameter, value, shape)))
                elif isinstance(value, Tensor) and value.ndim == 0:
                    out.append(Shard(key, name, (), whole_pieces(value, ())))
                elif value is not None:
                    raise CheckpointError(
                        f"optimizer {self.run.optimizer.name} keeps {key} of {name} as a {type(value).__name__}, and "
                        f"checkpoints hold tensors of the parameter's shape and scalar ones; use another optimizer"
                    )
        for matrix, state in (self.optimizer.state if self.optimizer else {}).items():
            if isinstance(matrix, str):  # a `MatrixOptimizer` keeps it on this rank alone
                out += [Shard(key, matrix, tuple(v.shape), whole_pieces(v, tuple(v.shape))) for key, v in state.items()]
        for name, buffer in self.model.weights.buffers().items():
            out.append(Shard("param", name, tuple(buffer.shape), whole_pieces(buffer, tuple(buffer.shape))))
        return out

    def gradients(self) -> list[Shard]:
        """This rank's part of the gradients, times `gradient_scale`; valid after `forward_backward`."""
        out = []
        for name, parameter in self.model.weights.parameters().items():
            gradient = self.held_gradient(parameter)
            if gradient is not None:
                shape = self.model.weights.logical_shape(name, self.full_shape(parameter))
                out.append(Shard("grad", name, tuple(shape), self.pieces(parameter, gradient, shape)))
        return out

    def full_shape(self, parameter: nn.Parameter) -> torch.Size:
        """Shape of a parameter with padding, also where an engine keeps something else in its place."""
        return parameter.shape

    def held(self, parameter: nn.Parameter) -> Tensor:
        """Memory of this rank's part of a parameter."""
        return parameter

    def held_state(self, parameter: nn.Parameter) -> dict[str, Any]:
        """This rank's optimizer state of a parameter, by the optimizer's names, laid out as `held` is."""
        return self.optimizer.state.get(parameter, {}) if self.optimizer else {}

    def held_gradient(self, parameter: nn.Parameter) -> Tensor | None:
        """This rank's part of a parameter's gradient, laid out as `held` is."""
        return parameter.grad

    def pieces(self, parameter: nn.Parameter, held: Tensor, shape: torch.Size) -> list[Piece]:
        """Boxes in the logical `shape` of `held`: this rank's part of `parameter` or of a tensor shaped like it."""
        return dtensor_pieces(held, tuple(shape)) if isinstance(held, DTensor) else whole_pieces(held, tuple(shape))

    def loaded(self) -> None:
        """Refresh whatever is derived from the shards; called after they were filled."""
