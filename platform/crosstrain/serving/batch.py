"""The sequences that a server computes, the same on every rank."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field

import torch
from torch import Tensor

from crosstrain.distributed.group import Group
from crosstrain.engine.runner import Runner
from crosstrain.inference.generation import Growing
from crosstrain.inference.kv_slots import Lanes
from crosstrain.utils.errors import UserError
from crosstrain.utils.types import Sample


@dataclass(frozen=True)
class Tick:
    """What all ranks do next, in this order. Rank 0 decides it."""

    stop: bool = False
    freed: list[int] = field(default_factory=list)  # rows
    started: list[tuple[list[int], Sample]] = field(default_factory=list)  # a prompt, and the rows that go on from it
    tokens: dict[int, int] = field(default_factory=dict)  # row: the token that it grows by


class Rows:
    """`size` rows, in each of which a sequence can grow. Every rank of a runner has the same ones.

    A row's logits do not depend on the other rows, up to rounding. Rows are computed together where `Lanes` can hold
    the model's cache, else one after another.
    """

    def __init__(self, runner: Runner, size: int) -> None:
        self._runner = runner
        self._lanes = Lanes(size) if runner.model.takes_positions and Lanes.can_hold(runner.model.new_cache()) else None
        self._growing: dict[int, Growing] = {}

    def start(self, rows: list[int], sample: Sample) -> Tensor:
        """Logits [vocabulary] of what follows a prompt, from which the rows go on. Collective."""
        if self._lanes is None:
            for row in rows:
                self._growing[row] = Growing(self._runner, sample)
                logits = self._growing[row].logits()
            return logits[0]
        growing = Growing(self._runner, sample)
        logits = growing.logits()
        for row in rows:
            self._lanes.take(row, growing.cache)
        return logits[0]

    def step(self, tokens: dict[int, int]) -> dict[int, Tensor]:
        """Logits [vocabulary] of each row that has grown by a token. Collective."""
        if self._lanes is None:
            for row, token in tokens.items():
                self._growing[row].append(torch.tensor([token]))
            return {row: self._growing[row].logits()[0] for row in tokens}
        logits = self._runner.evaluate(self._lanes.batch(tokens)).float().cpu()
        self._lanes.done(tokens)
        return {row: logits[row] for row in tokens}

    def free(self, row: int) -> None:
        if self._lanes is not None:
            self._lanes.free(row)
        self._growing.pop(row, None)


def follow(rows: Rows, group: Group) -> None:
    """What the ranks do that do not serve: the same as rank 0, until it stops. Collective."""
    while not (tick := group.broadcast(Tick())).stop:
        for row in tick.freed:
            rows.free(row)
        for places, sample in tick.started:
            with suppress(UserError):  # every rank finds it; rank 0 tells
                rows.start(places, sample)
        if tick.tokens:
            rows.step(tick.tokens)
