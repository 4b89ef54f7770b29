"""Measurements of a runner's tensors against the reference's, box by box, with nothing gathered."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from crosstrain.checkpoint.boxes import Box, Piece, Shard
from crosstrain.checkpoint.checkpointer import Checkpointer, Retention
from crosstrain.checkpoint.files import Reader
from crosstrain.checkpoint.folders import step_folder
from crosstrain.data.loader import MicroBatch
from crosstrain.training.callback import Callback
from crosstrain.training.trainer import Trainer
from crosstrain.utils.types import Batch

Products = list[float]  # scalar products of a few vectors with each other: [aa, ab, ac, bb, bc, cc] of a, b and c
Measured = dict[str, Products]  # by parameter

_EPSILONS = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-9, torch.float16: 2.0**-12}  # relative, of a rounding


class Probe(Callback):
    """Observer of the steps of a run, between backward and update and after the update.

    The reference (`write`) leaves gradients and state in `folder`, as boxes; the others compare theirs box by box.
    """

    def __init__(self, trainer: Trainer, folder: Path, *, write: bool, disturb: bool) -> None:
        super().__init__(None, trainer)
        self.runner, self.write, self.disturbs, self.step = trainer.runner, write, disturb, trainer.state.step
        self.group = self.runner.new_group()
        self._restore: Callable[[], None] = lambda: None
        self.steps: list[dict[str, Any]] = []
        self._files = {
            kind: Checkpointer(folder / kind, self.group, Retention(None), lambda _: None)
            for kind in ("gradients", "state")
        }
        self._keep("state", self.runner.shards())

    def before_step(self) -> None:
        if self.disturbs:
            self._restore = self._disturb()

    def after_backward(self) -> None:
        """Record learning rates and gradients."""
        self._restore()
        optimizer = self.runner.optimizer
        assert optimizer is not None
        self.step += 1
        rates = sorted({group["lr"] / group.get("lr_scale", 1.0) for group in optimizer.param_groups})
        shards = self.runner.gradients()
        for piece in (piece for shard in shards for piece in shard.pieces):
            piece.data = piece.data.detach().to("cpu", torch.float32) / self.runner.gradient_scale
        self._keep("gradients", shards)
        gradients, ranks = self.measure(shards, [self.reader("gradients")], lambda g, r: [g - r[0], r[0]])
        recorded = {"gradients": gradients, "gradient_ranks": ranks, "gradient_spread": self.spread(shards)}
        recorded |= {"rates": rates, "held_gradients": self.held(shards)}
        if not self.steps:  # of the first step alone the weights of the micro batches are solved for
            recorded["projections"] = self.project(shards)
        self.steps.append(recorded)

    def after_update(self, moments: bool) -> None:
        """Record weights and, if asked, the optimizer's state. Collective."""
        shards = self.runner.shards()
        parameters = [s for s in shards if s.kind == "param"]
        self._keep("state", shards if moments else parameters)
        now, before = self.reader("state"), self.reader("state", self.step - 1)
        weights, ranks = self.measure(
            [s for s in parameters if (s.kind, s.name) in now.tensors], [now, before],
            lambda w, r: [w - r[0], r[0] - r[1], r[1]],
        )  # fmt: skip
        recorded: dict[str, Any] = {"weights": weights, "weight_ranks": ranks, "weight_spread": self.spread(parameters)}
        if moments:
            recorded |= self.against(now, shards) | {"held": self.held(shards)}
        self.steps[-1] |= recorded

    def against(self, there: Reader, shards: list[Shard]) -> dict[str, Any]:
        """State here against that in a checkpoint: what lacks, what is more, differences by kind. Collective."""
        here = set().union(*self.group.all_gather({(s.kind, s.name) for s in shards}))
        common = [s for s in shards if (s.kind, s.name) in there.tensors]
        by_kind, ranks = {}, {}
        for kind in sorted({kind for kind, _ in here & there.tensors.keys()}):
            own = [s for s in common if s.kind == kind]
            by_kind[kind], ranks[kind] = self.measure(own, [there], lambda a, r: [a - r[0], r[0]])
        return {
            "missing": sorted(f"{kind} of {name}" for kind, name in there.tensors.keys() - here),
            "surplus": sorted(f"{kind} of {name}" for kind, name in here - there.tensors.keys()),
            "state": by_kind,
            "state_ranks": ranks,
        }

    def held(self, shards: list[Shard]) -> list[dict[str, int]]:
        """Elements that each rank says it holds, by kind. Collective."""
        mine: dict[str, int] = {}
        for shard in shards:
            mine[shard.kind] = mine.get(shard.kind, 0) + sum(piece.box.numel for piece in shard.pieces)
        return self.group.all_gather(mine)

    def reader(self, kind: str, step: int | None = None) -> Reader:
        return Reader.open(step_folder(self._files[kind].root, self.step if step is None else step))

    def _keep(self, kind: str, shards: list[Shard]) -> None:
        if self.write:
            self._files[kind].save(self.step, shards, {"step": self.step}, background=False)
            self._files[kind].wait()

    # ---- sums over tensors that are spread over ranks

    def measure(
        self, shards: Iterable[Shard], readers: list[Reader], vectors: Callable[[Tensor, list[Tensor]], list[Tensor]]
    ) -> tuple[Measured, dict[str, list[int]]]:
        """Products of vectors by parameter, each element counted once, and the ranks that are off. Collective.

        `vectors` gets a piece's data and that of the same box in every reader; its first result is the difference.
        A rank is off if its own part differs at least four times as much as that of another rank.
        """
        mine: dict[tuple[str, Box], Products] = {}
        for shard in shards:
            there = [[Piece(p.box, torch.zeros(p.box.shape)) for p in shard.pieces] for _ in readers]
            for reader, pieces in zip(readers, there, strict=True):
                reader.fill([Shard(shard.kind, shard.name, shard.shape, pieces)])
            for piece, *others in zip(shard.pieces, *there, strict=True):
                found = vectors(piece.data.detach().cpu().double(), [other.data.double() for other in others])
                products = [_dot(a, b) for i, a in enumerate(found) for b in found[i:]]
                mine[shard.name, piece.box] = products
        gathered = self.group.all_gather(mine)
        own: dict[str, dict[int, float]] = {}  # squared difference, by parameter and rank
        for rank, boxes in enumerate(gathered):
            for (name, _), products in boxes.items():
                parts = own.setdefault(name, {})
                parts[rank] = parts.get(rank, 0.0) + products[0]
        off = {n: [r for r, d in p.items() if not d <= 16 * min(p.values()) + 1e-30] for n, p in own.items()}
        return _by_parameter(gathered), {name: ranks for name, ranks in off.items() if ranks}

    def spread(self, shards: Iterable[Shard]) -> dict[str, float]:
        """Distance of a tensor's replicas, relative to its size, where ranks hold different ones. Collective."""
        pieces = [(s, p.box, p.data.detach().cpu()) for s in shards for p in s.pieces]
        mine = {(s.name, box): (_dot(data, data), _dot(data, _signs(s, box))) for s, box, data in pieces}
        held: dict[Any, list[tuple[float, float]]] = {}
        for rank in self.group.all_gather(mine):
            for key, value in rank.items():
                held.setdefault(key, []).append(value)
        out: dict[str, float] = {}
        for (name, _), values in held.items():
            sizes, projections = zip(*values, strict=True)
            apart = (max(projections) - min(projections)) / max(max(sizes) ** 0.5, 1e-30)
            if apart:
                out[name] = max(out.get(name, 0.0), apart)
        return out

    def project(self, shards: Iterable[Shard]) -> dict[str, float]:
        """A random projection of each tensor, which does not depend on how it is cut. Collective."""
        mine = {(s.name, p.box): [_dot(p.data, _signs(s, p.box))] for s in shards for p in s.pieces}
        return {name: products[0] for name, products in _by_parameter(self.group.all_gather(mine)).items()}

    # ---- the reference alone

    def parts(self, step: list[MicroBatch], num_targets: int) -> list[dict[str, float]]:
        """Projections of the gradient of each micro batch alone, weighted as in the step. For a single rank."""
        out = []
        for micro_batch in step:
            self.runner.forward_backward([micro_batch], num_targets)
            shards = self.runner.gradients()
            out.append({n: value / self.runner.gradient_scale for n, value in self.project(shards).items()})
            self.runner.model.zero_grad(set_to_none=True)
        return out

    def _disturb(self) -> Callable[[], None]:
        """Round the weights otherwise, by up to a rounding of the type that computes; returns the way back."""
        epsilon = _EPSILONS[self.runner.precision.dtype]
        pieces = [(s, p, p.data.clone()) for s in self.runner.shards() if s.kind == "param" for p in s.pieces]
        for shard, piece, kept in pieces:
            generator = torch.Generator().manual_seed(zlib.crc32(shard.name.encode()) + self.step)
            noise = (2 * torch.rand(shard.shape, generator=generator) - 1)[piece.box.slices_in(Box.whole(shard.shape))]
            piece.data.copy_(kept * (1 + epsilon * noise.to(kept.device)))
        self.runner.loaded()

        def restore() -> None:
            for _, piece, kept in pieces:
                piece.data.copy_(kept)
            self.runner.loaded()

        return restore


def _by_parameter(gathered: list[dict[tuple[str, Box], Products]]) -> Measured:
    """Sums over boxes, of which replicas count once."""
    boxes = {key: products for held in reversed(gathered) for key, products in held.items()}
    total: Measured = {}
    for (name, _), products in boxes.items():
        total[name] = [a + b for a, b in zip(products, total.get(name, [0.0] * len(products)), strict=True)]
    return total


def _dot(a: Tensor, b: Tensor) -> float:
    return (a.detach().cpu().double() * b.cpu().double()).sum().item()


def _signs(shard: Shard, box: Box) -> Tensor:
    """Random signs of a box, the same for every cut of the tensor."""
    generator = torch.Generator().manual_seed(zlib.crc32(shard.name.encode()))
    whole = torch.randint(0, 2, shard.shape, generator=generator, dtype=torch.int8) * 2 - 1
    return whole[box.slices_in(Box.whole(shard.shape))]


def digests(batch: Batch) -> dict[str, str]:
    """Short hashes of a batch's tensors, by field."""
    return {
        key: hashlib.sha256(value.detach().cpu().contiguous().numpy().tobytes()).hexdigest()[:16]
        for key, value in batch.items()
        if isinstance(value, Tensor) and value.dtype != torch.bfloat16
    }
