"""Optimizers that need whole matrices, under runners whose ranks hold parts of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from crosstrain.checkpoint.boxes import Box, Shard
from crosstrain.distributed.group import Group
from crosstrain.utils.errors import ConfigError

UPDATE = "update"  # kind of the shards of `direction`'s results, which are state within a step only
Holdings = dict[str, tuple[tuple[int, ...], list[Box]]]  # shape and a rank's boxes, by name


@dataclass(frozen=True)
class Matrix:
    """A logical matrix [m, n], or stack of such, whose parts meet on one rank."""

    name: str
    shape: tuple[int, ...]
    owner: int
    boxes: list[list[Box]]  # that each rank holds
    sent: list[list[Box]]  # that each rank sends to the owner: every box once


def assign_owners(by_rank: list[Holdings]) -> list[list[Matrix]]:
    """Choose an owner for each matrix: the heaviest first, to the holder with the least work (m^2 n) so far.

    Returns rounds, in which each rank owns one matrix at most. Every rank computes the same from the same holdings.
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
    """Base class of optimizers whose update of a hidden matrix depends on all of it.

    Such a matrix is gathered, as described by the runner's boxes, to one of the ranks that hold it, transformed there,
    and its parts are sent back. So every runner computes the same. `Model.weights.matrices` chooses the matrices; all
    else is left to the optimizer `rest`, which works element by element.

    A subclass implements `transform`, and `direction` and `apply` where it needs to.
    """

    dtype = torch.float32  # of what `transform` returns
    _shards: Callable[[], list[Shard]] | None = None

    def __init__(
        self, groups: list[dict[str, Any]], lr: float, rest: Callable[[list[dict[str, Any]]], torch.optim.Optimizer]
    ) -> None:
        super().__init__(groups, {"lr": lr, "weight_decay": 0.0})
        plain = [group for group in self.param_groups if "matrices" not in group]
        self._rest = rest(plain) if plain else None
        self._rounds: dict[tuple[int, ...], list[list[Matrix]]] = {}  # by the parameters that are stepped together

    # ---- for subclasses

    def direction(self, gradient: Tensor, state: dict[str, Any]) -> Tensor:
        """This rank's part of what `transform` is given, element by element; may overwrite the gradient.

        `state` is the parameter's, shaped as the gradient: flat or sharded where the runner's parameters are.
        """
        return gradient

    def transform(self, matrix: Tensor, state: dict[str, Tensor]) -> Tensor:
        """The update of a whole matrix [m, n], or of a stack [..., m, n] of them, not to be changed in place.

        `state` is kept for this matrix by its owner, in tensors of any shape that begin as zeros.
        """
        raise NotImplementedError

    def apply(self, weight: Tensor, update: Tensor, group: dict[str, Any], shape: tuple[int, ...]) -> None:
        """Change a part of a weight, in place, by the same part of the update; `shape` is the whole matrix's."""
        weight.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-group["lr"])

    # ---- for runners

    def bind(self, shards: Callable[[], list[Shard]], group: Group, device: torch.device) -> None:
        """Take parts of weights and updates from `shards`, and compute on `device`.

        The ranks of `group` hold all parts of the matrices that one of them has, and step together.
        """
        self._shards, self._group, self._device = shards, group, device

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update the parameters in the groups as they now are; engines may step some of them at a time. Collective."""
        if self._rest is not None:
            self._rest.state = self.state
            self._rest.param_groups = [group for group in self.param_groups if "matrices" not in group]
            self._rest.step()
        cut = [p for g in self.param_groups if "matrices" in g for p in g["params"] if p.grad is not None]
        for p in cut:
            self.state[p][UPDATE] = self.direction(p.grad, self.state[p])
        if cut or self._shards is not None:  # ranks without a part take part
            self._update_matrices(tuple(id(p) for group in self.param_groups for p in group["params"]))
        for p in cut:
            del self.state[p][UPDATE]

    def _update_matrices(self, stepped: tuple[int, ...]) -> None:
        if self._shards is None:
            raise ConfigError(
                f"run.optimizer: {type(self).__name__} updates whole matrices, and this runner does not say which "
                f"parts of them its ranks hold (Runner.bound); use an elementwise optimizer, or another runner"
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
        """This rank's parts of a round's matrices, transformed by their owners."""
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
        """Send tensors to each rank of the group, and receive from each of them tensors of these boxes."""
        flat = [part.reshape(-1) for parts in sent for part in parts]
        received = torch.cat(flat or [torch.empty(0)]).to(self._device, dtype)
        if self._group.process_group is not None:
            sizes = [sum(box.numel for box in each) for each in boxes]
            lengths = [sum(part.numel() for part in parts) for parts in sent]
            out, received = received, received.new_empty(sum(sizes))
            dist.all_to_all_single(received, out, sizes, lengths, group=self._group.process_group)
        parts = iter(received.split([box.numel for each in boxes for box in each]))
        return [{box: next(parts).view(box.shape) for box in each} for each in boxes]
