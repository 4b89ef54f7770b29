"""Optimizers that compute updates from whole matrices, even if the runner shards the matrices."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from crosstrain import Box, ConfigError, Group, Shard
from crosstrain.engine.optimizer import UPDATE

Holdings = dict[str, tuple[tuple[int, ...], list[Box]]]  # matrix name -> (shape, boxes held by one rank)


@dataclass(frozen=True)
class Matrix:
    """A logical matrix [m, n], or a stack of matrices, gathered to one rank for its update."""

    name: str
    shape: tuple[int, ...]
    owner: int
    boxes: list[list[Box]]  # boxes held by each rank
    sent: list[list[Box]]  # boxes that each rank sends to the owner; each box is sent once


def assign_owners(by_rank: list[Holdings]) -> list[list[Matrix]]:
    """Choose an owner for each matrix, in order of decreasing work.

    The owner is the rank with the least work so far, among the ranks that hold a shard. The work of a matrix is
    m n min(m, n). Returns rounds; in each round, a rank owns at most one matrix. The result is the same on every rank.
    """
    shapes = {name: shape for held in by_rank for name, (shape, _) in held.items()}
    work = {name: math.prod(shape) * min(shape[-2:]) for name, shape in shapes.items()}
    load, owned = [0] * len(by_rank), [list[Matrix]() for _ in by_rank]
    for name in sorted(shapes, key=lambda name: (-work[name], name)):
        boxes = [held[name][1] if name in held else [] for held in by_rank]
        holders: dict[Box, list[int]] = {}
        for rank, here in enumerate(boxes):
            for box in here:
                holders.setdefault(box, []).append(rank)
        owner = min((rank for rank, here in enumerate(boxes) if here), key=lambda rank: (load[rank], rank))
        load[owner] += work[name]
        sent: list[list[Box]] = [[] for _ in by_rank]
        for box, ranks in holders.items():
            sent[owner if owner in ranks else ranks[owner % len(ranks)]].append(box)
        owned[owner].append(Matrix(name, shapes[name], owner, boxes, sent))
    return [[matrix for matrix in matrices if matrix is not None] for matrices in zip_longest(*owned)]


class MatrixOptimizer(torch.optim.Optimizer):
    """Base class of optimizers that compute the update of a hidden-layer matrix from the whole matrix.

    The runner's boxes describe the shards of a matrix. One of the ranks that hold a shard gathers all shards, runs
    `transform`, and sends the shards of the update back. The update is therefore the same under every runner.
    `Model.weights.matrices` selects the matrices; the elementwise optimizer `rest` updates all other parameters.

    A subclass implements `transform`, and overrides `direction` and `apply` if needed.
    """

    dtype = torch.float32  # dtype of the tensors returned by `transform`
    _shards: Callable[[], list[Shard]] | None = None

    def __init__(
        self, groups: list[dict[str, Any]], lr: float, rest: Callable[[list[dict[str, Any]]], torch.optim.Optimizer]
    ) -> None:
        super().__init__(groups, {"lr": lr, "weight_decay": 0.0})
        plain = [group for group in self.param_groups if "matrices" not in group]
        self._rest = rest(plain) if plain else None
        self._rounds: dict[tuple[int, ...], list[list[Matrix]]] = {}  # IDs of the parameters in a step -> rounds

    # ---- for subclasses

    def direction(self, gradient: Tensor, state: dict[str, Any]) -> Tensor:
        """Compute this rank's shard of the input of `transform`, element by element.

        The gradient may be overwritten. `state` is the parameter's optimizer state. The tensors in
        `state` have the shape of the gradient: flat or sharded, like the parameters.
        """
        return gradient

    def transform(self, matrix: Tensor, state: dict[str, Tensor]) -> Tensor:
        """Compute the update of a matrix [m, n] or a stack [..., m, n]. Do not change `matrix` in place.

        `state` is the matrix's state on its owner: tensors of any shape, initialized to zeros.
        """
        raise NotImplementedError

    def apply(self, weight: Tensor, update: Tensor, group: dict[str, Any], shape: tuple[int, ...]) -> None:
        """Update a weight's shard in place with the matching shard of the update; `shape`: the whole matrix's shape."""
        weight.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-group["lr"])

    # ---- for runners

    def bind(self, shards: Callable[[], list[Shard]], group: Group, device: torch.device) -> None:
        """Set where `step` gets this rank's shards of weights and updates (`shards`), and the device it computes on.

        The ranks of `group` together hold the whole matrices, and call `step` together.
        """
        self._shards, self._group, self._device = shards, group, device

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update the parameters in the current groups. An engine may leave parameters out of the groups. Collective."""
        if self._rest is not None:
            self._rest.state = self.state
            self._rest.param_groups = [group for group in self.param_groups if "matrices" not in group]
            self._rest.step()
        cut = [p for g in self.param_groups if "matrices" in g for p in g["params"] if p.grad is not None]
        for p in cut:
            self.state[p][UPDATE] = self.direction(p.grad, self.state[p])
        if cut or self._shards is not None:  # ranks without a shard join the exchange
            self._update_matrices(tuple(id(p) for group in self.param_groups for p in group["params"]))
        for p in cut:
            del self.state[p][UPDATE]

    def _update_matrices(self, stepped: tuple[int, ...]) -> None:
        if self._shards is None:
            raise ConfigError(
                f"run.optimizer: {type(self).__name__} updates whole matrices, but this runner does not give it access "
                f"to its shards (HeldState.bound); use an elementwise optimizer, or a different runner"
            )
        weights: dict[str, dict[Box, Tensor]] = {}
        updates: dict[str, dict[Box, Tensor]] = {}
        held: Holdings = {}
        for shard in self._shards():
            parts = {piece.box: piece.data for piece in shard.pieces if piece.box.numel}
            if shard.kind == "param":
                weights[shard.name] = parts
            elif shard.kind == UPDATE:
                updates[shard.name], held[shard.name] = parts, (shard.shape, list(parts))
        if stepped not in self._rounds:
            self._rounds[stepped] = assign_owners(self._group.all_gather(held))
        groups = {name: group for group in self.param_groups for name in group.get("matrices", ())}
        for matrices in self._rounds[stepped]:
            for matrix, parts in self._transformed(matrices, updates):
                for box, update in parts.items():
                    weight = weights[matrix.name][box]
                    self.apply(weight, update.to(weight.device), groups[matrix.name], matrix.shape)

    def _transformed(
        self, matrices: list[Matrix], updates: dict[str, dict[Box, Tensor]]
    ) -> list[tuple[Matrix, dict[Box, Tensor]]]:
        """Return this rank's shards of the updates in a round, computed by the owners of the matrices."""
        me, nothing = self._group.rank, [list[Box]()] * self._group.size
        to_owners, to_holders = [list[Tensor]() for _ in nothing], [list[Tensor]() for _ in nothing]
        for matrix in matrices:
            to_owners[matrix.owner] = [updates[matrix.name][box] for box in matrix.sent[me]]
        mine = next((matrix for matrix in matrices if matrix.owner == me), None)
        parts = self._exchange(to_owners, mine.sent if mine else nothing, torch.float32)
        if mine is not None:
            place, whole = Box.whole(mine.shape), torch.empty(mine.shape, device=self._device)
            for by_box in parts:
                for box, part in by_box.items():
                    whole[box.slices_in(place)] = part
            state: dict[Any, dict[str, Any]] = self.state
            whole = self.transform(whole, state[mine.name])
            to_holders = [[whole[box.slices_in(place)] for box in boxes] for boxes in mine.boxes]
        back = nothing.copy()
        for matrix in matrices:
            back[matrix.owner] = matrix.boxes[me]
        parts = self._exchange(to_holders, back, self.dtype)
        return [(matrix, parts[matrix.owner]) for matrix in matrices]

    def _exchange(
        self, sent: list[list[Tensor]], boxes: list[list[Box]], dtype: torch.dtype
    ) -> list[dict[Box, Tensor]]:
        """Send tensors to each rank of the group, and receive the tensors of `boxes` from each rank."""
        flat = [part.reshape(-1) for parts in sent for part in parts]
        received = torch.cat(flat or [torch.empty(0)]).to(self._device, dtype)
        if self._group.process_group is not None:
            sizes = [sum(box.numel for box in each) for each in boxes]
            lengths = [sum(part.numel() for part in parts) for parts in sent]
            out, received = received, received.new_empty(sum(sizes))
            dist.all_to_all_single(received, out, sizes, lengths, group=self._group.process_group)
        parts = iter(received.split([box.numel for each in boxes for box in each]))
        return [{box: next(parts).view(box.shape) for box in each} for each in boxes]
