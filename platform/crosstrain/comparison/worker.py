"""Record a few steps under one runner: numbers, and gradients against the reference's, with nothing gathered."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from crosstrain.checkpoint.boxes import Box, Piece, Shard
from crosstrain.checkpoint.checkpointer import Checkpointer, Retention
from crosstrain.checkpoint.files import Reader
from crosstrain.checkpoint.folders import step_folder
from crosstrain.comparison.diagnosis import Sums
from crosstrain.config.load import Config
from crosstrain.data.loader import Step
from crosstrain.distributed.launch.signals import StopRequest
from crosstrain.engine.build import make_runner
from crosstrain.engine.runner import Runner
from crosstrain.inference.perplexity import evaluate_loss
from crosstrain.monitor.hardware import memory_mb
from crosstrain.training.callback import Callback
from crosstrain.training.trainer import Trainer
from crosstrain.training.worker import build_trainer


class Probe(Callback):
    """Observer of every step between backward and update, and of the state before the first and after the last.

    The reference (`write`) leaves gradients and state in `folder`, as boxes; the others compare theirs box by box.
    """

    def __init__(self, trainer: Trainer, folder: Path, write: bool) -> None:
        super().__init__(None, trainer)
        self.runner, self.write = trainer.runner, write
        self.rates: list[float] = []
        self.gradients: list[dict[str, Sums]] = []
        self.spread: dict[str, float] = {}
        self.seconds = 0.0  # spent here
        self.group = self.runner.new_group()
        self._files = {
            kind: Checkpointer(folder / kind, self.group, Retention(None), lambda _: None)
            for kind in ("gradients", "state")
        }
        self._keep("state", 0, self.runner.shards())

    def after_backward(self) -> None:
        """Record learning rate and gradients."""
        started = time.perf_counter()
        optimizer = self.runner.optimizer
        assert optimizer is not None
        self.rates.append(optimizer.param_groups[0]["lr"] / optimizer.param_groups[0].get("lr_scale", 1.0))
        step = len(self.rates)
        shards = self.runner.gradients()
        for piece in (piece for shard in shards for piece in shard.pieces):
            piece.data = piece.data.detach().to("cpu", torch.float32) / self.runner.gradient_scale
        if step == 1:
            self.spread = self._spread(shards)
        self._keep("gradients", step, shards)
        self.gradients.append(self._sums(shards, self._reader("gradients", step)))
        self.seconds += time.perf_counter() - started

    def final_state(self) -> dict[str, Any]:
        """The state after the last step, against the reference's. Collective."""
        last, shards = len(self.rates), self.runner.shards()
        self._keep("state", last, shards)
        end, start = self._reader("state", last), self._reader("state", 0)
        here = set().union(*self.group.all_gather({(s.kind, s.name) for s in shards}))
        common = [s for s in shards if (s.kind, s.name) in end.tensors]
        parameters = [s for s in common if s.kind == "param"]
        return {
            "missing": sorted(f"{kind} of {name}" for kind, name in end.tensors.keys() - here),
            "surplus": sorted(f"{kind} of {name}" for kind, name in here - end.tensors.keys()),
            "moments": {
                kind: self._sums([s for s in common if s.kind == kind], end) for kind in sorted(end.kinds() - {"param"})
            },
            "weights": self._sums(parameters, end),
            "travelled": self._sums(parameters, start),
            "weight_spread": self._spread(parameters),
        }

    def _keep(self, kind: str, step: int, shards: list[Shard]) -> None:
        if self.write:
            self._files[kind].save(step, shards, {"step": step})
            self._files[kind].wait()

    def _reader(self, kind: str, step: int) -> Reader:
        return Reader.open(step_folder(self._files[kind].root, step))

    def _sums(self, shards: list[Shard], reference: Reader) -> dict[str, Sums]:
        """Sums over the elements of every tensor, each element counted once, by parameter. Collective."""
        mine: dict[tuple[str, Box], Sums] = {}
        for shard in shards:
            theirs = [Piece(piece.box, torch.zeros(piece.box.shape)) for piece in shard.pieces]
            reference.fill([Shard(shard.kind, shard.name, shard.shape, theirs)])
            for piece, other in zip(shard.pieces, theirs, strict=True):
                g, r = piece.data.detach().cpu().double(), other.data.double()
                mine[shard.name, piece.box] = (_dot(g - r, g - r), _dot(g, g), _dot(g, r), _dot(r, r))
        boxes = {key: sums for held in reversed(self.group.all_gather(mine)) for key, sums in held.items()}
        total: dict[str, Sums] = {}
        for (name, _), sums in boxes.items():
            a, b, c, d = (x + y for x, y in zip(sums, total.get(name, (0.0,) * 4), strict=True))
            total[name] = (a, b, c, d)
        return total

    def _spread(self, shards: list[Shard]) -> dict[str, float]:
        """Distance of a tensor's replicas, relative to its size: zero where ranks hold the same."""
        pieces = [(s.name, p.box, p.data.detach().cpu()) for s in shards for p in s.pieces]
        mine = {(name, box): (_dot(data, data), _projection(data)) for name, box, data in pieces}
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


def _dot(a: Tensor, b: Tensor) -> float:
    return (a.double() * b.double()).sum().item()


def _projection(tensor: Tensor) -> float:
    """A random projection: different tensors almost never share it."""
    flat = tensor.double().flatten()
    signs = torch.randint(0, 2, flat.shape, generator=torch.Generator().manual_seed(0)) * 2 - 1
    return (flat * signs).sum().item()


def compare_worker(plain: dict[str, Any], job: dict[str, Any]) -> int:
    """Train a contestant on this rank and return 0 or a signal; rank 0 writes the record to `job["result"]`."""
    config = Config.from_plain(plain)
    runner = make_runner(config)
    runner.setup()
    before = memory_mb(runner.device).get("memory_peak_mb", 0.0)
    stop = StopRequest(True)
    trainer = build_trainer(config, runner, stop, quiet=True)
    plain_loss = evaluate_loss(
        runner, trainer.dataset, trainer.plan.micro_batch, trainer.plan.global_batch, config.run.num_workers
    )
    probe = Probe(trainer, job["folder"], write=job["is_reference"])
    trainer.callbacks.by_name["probe"] = probe
    samples: list[list[int]] = []
    batches = _noted(trainer.batches(), samples, job["reverse"])
    rows = []
    for _ in range(job["steps"]):
        started, observing = time.perf_counter(), probe.seconds
        metrics = trainer.train_step(batches)
        if metrics is None:
            runner.close()
            return stop.received or signal.SIGTERM
        kept = {key: getattr(metrics, key) for key in ("step", "loss", "grad_norm", "lr", "samples", "skipped_steps")}
        rows.append(kept | {"seconds": time.perf_counter() - started - (probe.seconds - observing)})
    names = [name for held in runner.world.all_gather(list(runner.model.canonical_parameters())) for name in held]
    peak = max(runner.world.all_gather(memory_mb(runner.device).get("memory_peak_mb", 0.0) - before))
    state = probe.final_state()
    firsts = [sorted(set().union(*ranks)) for ranks in zip(*runner.world.all_gather(samples), strict=True)]
    if runner.world.rank == 0:
        result = {
            "rows": rows, "first_samples": firsts[: len(rows)], "plain_loss": plain_loss.loss, "rates": probe.rates,
            "gradients": probe.gradients, "spread": probe.spread, "state": state, "names": list(dict.fromkeys(names)),
            "tied": _tied(runner), "dp_size": runner.dp.size, "accumulation": trainer.plan.accumulation,
            "memory_mb": peak,
        }  # fmt: skip
        job["result"].write_text(json.dumps(result))
    trainer.reporter.close()
    runner.close()
    return 0


def _noted(steps: Iterator[Step], samples: list[list[int]], reverse: bool) -> Iterator[Step]:
    """The same steps; the first sample number of each micro batch goes into `samples`."""
    for step in steps:
        samples.append([micro_batch.first_sample for micro_batch in step])
        if reverse:
            step.reverse()
        yield step


def _tied(runner: Runner) -> list[str]:
    """Canonical names of parameters that the model uses in more than one place."""
    first = {id(p): name for name, p in runner.model.canonical_parameters().items()}
    seen = [id(p) for _, p in runner.model.named_parameters(remove_duplicate=False)]
    return [name for key, name in first.items() if seen.count(key) > 1]
