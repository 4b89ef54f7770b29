"""A few steps under one runner, recorded: numbers, and gradients against the reference's, with nothing gathered."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from crosstrain import assembly
from crosstrain.checkpoint.boxes import Box, Piece, Shard
from crosstrain.checkpoint.checkpointer import Checkpointer, Retention
from crosstrain.checkpoint.folders import step_folder
from crosstrain.checkpoint.store import Reader
from crosstrain.config import Config
from crosstrain.data.stream import MicroBatch
from crosstrain.evaluation import evaluate_loss
from crosstrain.monitor.hardware import memory_mb
from crosstrain.runner import Runner, StepResult
from crosstrain.signals import StopRequest
from crosstrain.trainer import Trainer

Sums = tuple[float, float, float, float]  # of (g-r)^2, g*g, g*r and r*r, g a gradient and r the reference's


class Probe:
    """Looks at every step between its backward and its update.

    The reference (`write`) leaves its gradients in `folder`, as boxes; the others compare theirs box by box with those.
    """

    def __init__(self, runner: Runner, folder: Path, write: bool) -> None:
        self.runner, self.folder, self.write = runner, folder, write
        self.rates: list[float] = []
        self.gradients: list[dict[str, Sums]] = []
        self.spread: dict[str, float] = {}
        self.group = runner.new_group()
        self.checkpointer = Checkpointer(folder, self.group, Retention(None), lambda _: None)
        self._step = runner.optimizer_step
        runner.optimizer_step = self._look  # type: ignore[method-assign]

    def _look(self, apply: bool = True) -> StepResult:
        optimizer = self.runner.optimizer
        assert optimizer is not None
        self.rates.append(optimizer.param_groups[0]["lr"] / optimizer.param_groups[0].get("lr_scale", 1.0))
        step = len(self.rates)
        shards = [_unscaled(shard, self.runner.gradient_scale) for shard in self.runner.gradients()]
        if step == 1:
            self.spread = self._spread(shards)
        if self.write:
            self.checkpointer.save(step, shards, {"step": step})
            self.checkpointer.wait()
        self.gradients.append(self._against_reference(shards, step))
        return self._step(apply)

    def _against_reference(self, shards: list[Shard], step: int) -> dict[str, Sums]:
        """Sums over every tensor's elements, each element counted once."""
        reader = Reader.open(step_folder(self.folder, step))
        mine: dict[tuple[str, Box], Sums] = {}
        for shard in shards:
            theirs = [Piece(piece.box, torch.zeros(piece.box.shape)) for piece in shard.pieces]
            reader.fill([Shard("grad", shard.name, shard.shape, theirs)])
            for piece, other in zip(shard.pieces, theirs, strict=True):
                g, r = piece.data.double(), other.data.double()
                mine[shard.name, piece.box] = (_dot(g - r, g - r), _dot(g, g), _dot(g, r), _dot(r, r))
        boxes = {key: sums for held in reversed(self.group.all_gather(mine)) for key, sums in held.items()}
        total: dict[str, Sums] = {}
        for (name, _), sums in boxes.items():
            a, b, c, d = (x + y for x, y in zip(sums, total.get(name, (0.0,) * 4), strict=True))
            total[name] = (a, b, c, d)
        return total

    def _spread(self, shards: list[Shard]) -> dict[str, float]:
        """How far replicas of a gradient are apart, relative to its size: zero where ranks hold the same."""
        mine = {(s.name, p.box): (_dot(p.data, p.data), _projection(p.data)) for s in shards for p in s.pieces}
        held: dict[Any, list[tuple[float, float]]] = {}
        for rank in self.group.all_gather(mine):
            for key, value in rank.items():
                held.setdefault(key, []).append(value)
        out: dict[str, float] = {}
        for (name, _), values in held.items():
            sizes, projections = zip(*values, strict=True)
            scale = max(max(sizes) ** 0.5, 1e-30)
            out[name] = max(out.get(name, 0.0), (max(projections) - min(projections)) / scale)
        return out


def _unscaled(shard: Shard, scale: float) -> Shard:
    pieces = [Piece(piece.box, piece.data.detach().to("cpu", torch.float32) / scale) for piece in shard.pieces]
    return Shard(shard.kind, shard.name, shard.shape, pieces)


def _dot(a: Tensor, b: Tensor) -> float:
    return (a.double() * b.double()).sum().item()


def _projection(tensor: Tensor) -> float:
    """A number that tensors share only if they are equal, but for a chance of nothing."""
    flat = tensor.double().flatten()
    signs = torch.randint(0, 2, flat.shape, generator=torch.Generator().manual_seed(0)) * 2 - 1
    return (flat * signs).sum().item()


def compare_worker(plain: dict[str, Any], job: dict[str, Any]) -> int:
    """What every rank of a contestant runs; rank 0 leaves what was seen in `job["result"]`."""
    config = Config.from_plain(plain)
    runner = assembly.make_runner(config)
    runner.setup()
    before = memory_mb(runner.device).get("memory_peak_mb", 0.0)
    trainer = Trainer(config, runner, StopRequest(True), quiet=True)
    plain_loss = evaluate_loss(
        runner, trainer.dataset, trainer.plan.micro_batch, trainer.plan.global_batch, config.run.num_workers
    )
    probe = Probe(runner, Path(job["folder"]), write=job["is_reference"])
    batches = trainer.batches()
    if job["reverse"]:
        batches = (micro_batches[::-1] for micro_batches in batches)
    rows = list(_steps(trainer, batches, job["steps"]))
    peak = max(runner.world.all_gather(memory_mb(runner.device).get("memory_peak_mb", 0.0) - before))
    if runner.world.rank == 0:
        result = {
            "rows": rows,
            "plain_loss": plain_loss.loss,
            "rates": probe.rates,
            "gradients": probe.gradients,
            "spread": probe.spread,
            "names": list(runner.model.canonical_parameters()),
            "tied": _tied(runner),
            "dp_size": runner.dp.size,
            "accumulation": trainer.plan.accumulation,
            "memory_mb": peak,
        }
        Path(job["result"]).write_text(json.dumps(result))
    trainer.reporter.close()
    runner.close()
    return 0


def _steps(trainer: Trainer, batches: Iterator[list[MicroBatch]], count: int) -> Iterator[dict[str, Any]]:
    for _ in range(count):
        started = time.perf_counter()
        row = trainer.train_step(batches)
        yield {key: row[key] for key in ("step", "loss", "grad_norm", "lr", "samples")} | {
            "seconds": time.perf_counter() - started
        }


def _tied(runner: Runner) -> list[str]:
    """Canonical names of parameters that the model uses in more than one place."""
    first = {id(p): name for name, p in runner.model.canonical_parameters().items()}
    seen = [id(p) for _, p in runner.model.named_parameters(remove_duplicate=False)]
    return [name for key, name in first.items() if seen.count(key) > 1]
