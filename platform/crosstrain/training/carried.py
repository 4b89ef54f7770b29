"""The state of a run in the memory of its ranks, from which it goes on when ranks were lost or added."""

from collections import defaultdict
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from crosstrain.checkpoint.boxes import CALLBACK, Piece, Shard, check_cover, shared_kind
from crosstrain.checkpoint.checkpointer import Holding, assign, holdings
from crosstrain.checkpoint.manifest import STORED_DTYPES
from crosstrain.distributed.group import Group
from crosstrain.engine.build import as_stored
from crosstrain.engine.runner import Runner
from crosstrain.monitor.metrics import StepMetrics
from crosstrain.training.callback import Callback
from crosstrain.training.state import State
from crosstrain.utils.logging import log

if TYPE_CHECKING:
    from crosstrain.training.trainer import Trainer


class Settled(Callback):
    """Notes that the step is complete in the weights, the state and the run's callbacks; later hooks only report it."""

    def after_step(self, metrics: StepMetrics) -> None:
        self.trainer.settled = self.trainer.runner.updates


@dataclass
class Carried:
    """What one rank keeps of a trainer that has ended between two steps."""

    state: dict[str, Any]  # fields of `State`
    saved_step: int | None
    tensors: dict[Holding, Any]  # None in place of each tensor in the copies that ranks exchange

    @staticmethod
    def of(trainer: "Trainer") -> "Carried | None":
        """Return this rank's state; None if the rank was interrupted within an update."""
        if trainer.settled != trainer.runner.updates:
            return None
        tensors = holdings(trainer.runner.held.apart() + trainer.hooks.shards())
        return Carried(asdict(trainer.complete_state()), trainer.saved_step, tensors)

    @property
    def part(self) -> str:
        """Identifies this rank's part of the state: equal for ranks that hold the same boxes of the same step."""
        return sha256(repr((self.state["step"], list(self.tensors))).encode()).hexdigest()


class Handover:
    """The newest state that ranks carry, and the rank that sends each box of its tensors to the others."""

    def __init__(self, carried: Carried | None, offers: list[Carried | None], group: Group) -> None:
        self._carried, self._group = carried, group
        newest = max(offer.state["step"] for offer in offers if offer)
        givers = [offer if offer and offer.state["step"] == newest else None for offer in offers]
        first = next(offer for offer in givers if offer)
        self.state, self.saved_step = first.state, first.saved_step
        self._givers = assign([list(offer.tensors) if offer else [] for offer in givers])

    @staticmethod
    def of(carried: Carried | None, group: Group) -> "Handover | None":
        """Return the handover; None if the ranks' memory does not hold a whole state. Collective."""
        offers = group.all_gather(carried and replace(carried, tensors=dict.fromkeys(carried.tensors)))
        if not any(offers):
            return None
        handover = Handover(carried, offers, group)
        boxes = defaultdict(list)
        for holding in handover._givers:
            boxes[holding.kind, holding.name, holding.shape].append(holding.box)
        lost = {kind: name for (kind, name, shape), parts in boxes.items() if check_cover(parts, shape)}
        whole = {shared_kind(kind) for kind, _, _ in boxes if kind not in lost}
        for kind, name in lost.items():
            if shared_kind(kind) not in whole:
                log.info("a part of %s %s was lost, so the newest checkpoint is loaded", kind, name)
                return None
        handover._givers = {holding: giver for holding, giver in handover._givers.items() if holding.kind not in lost}
        return handover

    def restore(self, runner: Runner) -> State:
        """Load the weights, the optimizer state and the runner's own state, and return the run's. Collective."""
        shards = as_stored({holding.kind for holding in self._givers}, runner.held.apart())
        self._fill(shards, runner.device, of_callbacks=False)
        runner.held.stored = {shard.kind for shard in shards}
        runner.loaded()
        state = State(**self.state)
        state.give_to(runner)
        return state

    def restore_hooks(self, trainer: "Trainer") -> None:
        """Load the states of callbacks. Collective."""
        for name, callback in trainer.hooks.callbacks.items():
            callback.state |= trainer.state.callbacks[name]
        self._fill(trainer.hooks.shards(), trainer.runner.device, of_callbacks=True)

    def _fill(self, shards: list[Shard], device: torch.device, of_callbacks: bool) -> None:
        """Copy the state into this rank's shards; every box is broadcast to all ranks."""
        wanted: dict[tuple[str, str], list[Piece]] = defaultdict(list)
        for shard in shards:
            wanted[shard.kind, shard.name] += shard.pieces
        for holding, giver in self._givers.items():
            if holding.kind.startswith(CALLBACK) is not of_callbacks:
                continue
            if giver == self._group.rank and self._carried is not None:
                data = self._carried.tensors[holding].to(device).contiguous()
            else:
                data = torch.empty(holding.box.shape, dtype=STORED_DTYPES[holding.dtype], device=device)
            if self._group.process_group is not None:
                dist.broadcast(data, group=self._group.process_group, group_src=giver)
            received = Piece(holding.box, data)
            for piece in wanted[holding.kind, holding.name]:
                if (common := piece.box.intersect(holding.box)) is not None:
                    piece.part(common).copy_(received.part(common))
