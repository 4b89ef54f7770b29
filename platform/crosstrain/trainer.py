"""The training loop. One, for every runner, model and dataset; it asks none of them what it is."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from crosstrain import assembly
from crosstrain.checkpoint import folders
from crosstrain.checkpoint.checkpointer import Checkpointer, Retention, load_state
from crosstrain.config import BatchPlan, Config, plan_batch
from crosstrain.data.dataset import Dataset
from crosstrain.data.stream import MicroBatch, training_steps
from crosstrain.errors import CheckpointError
from crosstrain.evaluation import LossMetrics, evaluate_loss
from crosstrain.monitor.console import Progress, log, log_line, set_up_logging
from crosstrain.monitor.hardware import memory_mb, peak_flops
from crosstrain.monitor.trackers import JsonlTracker, TensorBoardTracker
from crosstrain.optim import make_schedule
from crosstrain.run_folder import RunFolder
from crosstrain.runner import Runner
from crosstrain.signals import StopRequest


@dataclass
class State:
    """What a run is, beside its tensors: this and the checkpoint's boxes are all that resuming needs."""

    step: int = 0  # attempted steps
    applied_steps: int = 0  # of those, the ones whose update was made; the learning rate's clock
    samples: int = 0  # samples consumed; the number of the next one
    best_loss: float = math.inf
    scaler: dict[str, Any] = field(default_factory=dict)


def run_length(config: Config, plan: BatchPlan, dataset: Dataset) -> int:
    """Steps of the whole run."""
    run = config.run
    if run.max_iters is not None:
        return run.max_iters
    assert run.max_epoch is not None  # one of the two is always given
    return math.ceil(run.max_epoch * len(dataset) / plan.global_batch)


class Trainer:
    """Trains what a configuration says, from where its folder says.

    Collective: every rank makes one and calls `fit`.
    """

    def __init__(self, config: Config, runner: Runner, stop: StopRequest) -> None:
        self.config, self.runner, self.stop = config, runner, stop
        run = self.run = config.run
        self.folder = RunFolder(run.output_dir)
        self.is_main = runner.world.rank == 0
        if self.is_main:
            self.folder.create()
            self.folder.write_config(config.plain)
        set_up_logging(self.folder.log if self.is_main else None, quiet=not self.is_main)

        self.dataset = assembly.open_split(config, "train")
        self.val_dataset = assembly.open_split(config, "val") if run.eval_interval else None
        self.plan = plan_batch(run, runner.dp.size)
        self.max_iters = run_length(config, self.plan, self.dataset)
        self.schedule = make_schedule(config, self.max_iters)

        start = self._starting_point()
        assembly.build(config, runner, start, for_training=True)
        self.state = self._restore(start)
        self.checkpointer = Checkpointer(
            self.folder.checkpoints, runner.new_group(), Retention(run.keep_last, run.keep_every), self._write_assets
        )
        self._saved_step = self.state.step if start and start.parent == self.folder.checkpoints else None
        self._trackers = self._make_trackers()
        self.stopped = False  # whether a signal ended the run early, the same on every rank
        self.last_validation: LossMetrics | None = None  # of the present step
        self._announce()

    # ---- starting

    def _starting_point(self) -> Path | None:
        """The checkpoint to go on from: the newest undamaged one here, else `run.resume_from`, else none."""
        newest: Path | None = None
        problem: CheckpointError | None = None
        if self.is_main:
            try:
                newest = self._newest()
            except CheckpointError as error:
                problem = error
        newest, problem = self.runner.world.all_gather((newest, problem))[0]
        if problem is not None:
            raise problem
        return newest

    def _newest(self) -> Path | None:
        newest, damaged = folders.newest_valid(self.folder.checkpoints)
        for sentence in damaged:
            log.warning("damaged checkpoint passed over: %s", sentence)
        if newest is None and damaged:
            raise CheckpointError(
                f"{self.folder.checkpoints}: every checkpoint is damaged; --fresh starts over and keeps them"
            )
        if newest is None and self.run.resume_from:
            newest = folders.find_checkpoint(Path(self.run.resume_from))
        return newest

    def _restore(self, checkpoint: Path | None) -> State:
        if checkpoint is None:
            return State()
        saved = load_state(checkpoint)
        try:
            state = State(
                int(saved["step"]), int(saved["applied_steps"]), int(saved["samples"]),
                float(saved["best_loss"] if saved["best_loss"] is not None else math.inf), dict(saved["scaler"]),
            )  # fmt: skip
            self.runner.precision.scaler.load_state(state.scaler)
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{checkpoint}: malformed state ({error!r})") from None
        if self.is_main:
            log.info("resuming %s at step %d (sample %d)", checkpoint, state.step, state.samples)
        return state

    def _make_trackers(self) -> list[JsonlTracker | TensorBoardTracker]:
        if not self.is_main:
            return []
        step = self.state.step
        return [
            JsonlTracker(self.folder.metrics, step),
            TensorBoardTracker(self.folder.tensorboard, step, self.config.plain),
        ]

    def _announce(self) -> None:
        parameters = self.runner.model.canonical_parameters().values()
        log.info(
            "%s: %s parameters (%s trainable), runner %s on %d %s worker(s), %s",
            self.config.model.name,
            f"{sum(p.numel() for p in parameters):,}",
            f"{sum(p.numel() for p in parameters if p.requires_grad):,}",
            self.config.runner.name,
            self.runner.world.size,
            self.runner.device.type,
            self.run.amp.dtype,
        )
        plan = self.plan
        log.info(
            "global batch %d = micro %d x accumulation %d x data parallel %d; %d training samples; steps %d to %d",
            plan.global_batch, plan.micro_batch, plan.accumulation, plan.dp_size, len(self.dataset),
            self.state.step + 1, self.max_iters,
        )  # fmt: skip

    # ---- the loop

    def fit(self) -> State:
        """Train to `max_iters` or until a stop is asked for, and save; returns the final state."""
        progress = Progress(self.max_iters, self.state.step, enabled=self.is_main)
        batches = training_steps(
            self.dataset, self.plan, seed=self.run.seed, start=self.state.samples,
            dp_rank=self.runner.dp.rank, num_workers=self.run.num_workers,
        )  # fmt: skip
        self._begin_interval()
        try:
            while self.state.step < self.max_iters:
                self.stopped = self._stop_agreed()
                if self.stopped:
                    break
                row = self._train_step(batches)
                self.last_validation = None
                progress.advance(row)
                if not self._due(self.run.log_interval):
                    row = {}
                else:
                    for line in log_line(row, self.max_iters):
                        log.info(line)
                    self._begin_interval()
                improved = False
                if self._due(self.run.eval_interval):
                    metrics, improved = self._validate()
                    row |= {"val_loss": metrics.loss, "val_perplexity": metrics.perplexity}
                if row:
                    self._track({"step": self.state.step} | row)
                if self._due(self.run.save_interval) or (improved and self.run.save_best):
                    self._save(best=improved and self.run.save_best)
            self._save(best=False)
            self.checkpointer.wait()
        finally:
            progress.close()
            for tracker in self._trackers:
                tracker.close()
        if self.stopped:
            log.info("stopped at step %d; the same command goes on from there", self.state.step)
        return self.state

    def _train_step(self, batches: Any) -> dict[str, Any]:
        """One attempted step; its numbers."""
        state, runner, timers = self.state, self.runner, self.runner.timers
        timers.reset(synchronize=(state.step + 1) % self.run.log_interval == 0)
        with timers("batch generator"):
            with timers("data loader"):
                micro_batches = next(batches)
            targets = self._count_targets(micro_batches)
        rate = self.schedule.rate(state.applied_steps + 1)
        runner.set_learning_rate(rate)
        scale = runner.precision.scaler.scale
        loss = runner.forward_backward(micro_batches, max(targets, 1))
        with timers("optimizer"):
            result = runner.optimizer_step()

        first, last = state.samples, state.samples + self.plan.global_batch - 1
        state.step += 1
        state.samples = last + 1
        state.applied_steps += result.applied
        runner.precision.update(not result.applied, f"step {state.step} (samples {first} to {last})")
        self._interval_steps += 1
        self._interval_tokens += targets
        seconds = time.perf_counter() - self._interval_start
        tokens_per_second = self._interval_tokens / seconds
        row = {
            "step": state.step,
            "loss": loss if math.isfinite(loss) else None,
            "lr": rate if result.applied else self.schedule.rate(state.applied_steps),
            "grad_norm": result.grad_norm if math.isfinite(result.grad_norm) else None,
            "loss_scale": scale,
            "samples": state.samples,
            "skipped_steps": state.step - state.applied_steps,
            "step_ms": 1000 * seconds / self._interval_steps,
            "tokens_per_second": tokens_per_second,
            "timers": {phase: 1000 * s for phase, s in timers.seconds.items()},
        }
        return row | self._efficiency(tokens_per_second)

    def _count_targets(self, micro_batches: list[MicroBatch]) -> int:
        """Target tokens of the whole step over all ranks, known before the first backward."""
        for micro_batch in micro_batches:
            micro_batch.num_targets = self.runner.model.num_targets(micro_batch.data)
        return int(self.runner.dp.all_reduce_sum(sum(m.num_targets for m in micro_batches))[0])

    def _efficiency(self, tokens_per_second: float) -> dict[str, float]:
        device = self.runner.device
        numbers = memory_mb(device)
        peak, flops = (
            peak_flops(device, self.runner.precision.dtype),
            self.runner.model.flops_per_token(self.dataset.sequence_length),
        )
        if peak and flops:
            numbers["mfu"] = tokens_per_second * flops / (peak * self.runner.world.size)
        return numbers

    def _due(self, interval: int | None) -> bool:
        return interval is not None and self.state.step % interval == 0

    def _stop_agreed(self) -> bool:
        """Whether any rank was asked to stop: all leave at the same step."""
        return self.runner.world.all_reduce_sum(bool(self.stop))[0] > 0

    def _begin_interval(self) -> None:
        self._interval_steps, self._interval_tokens = 0, 0
        self._interval_start = time.perf_counter()

    def _track(self, row: dict[str, Any]) -> None:
        for tracker in self._trackers:
            tracker.log(row)

    # ---- validation and saving

    def validate(self) -> LossMetrics:
        """Loss on the validation split's first `eval_iters` global batches. Collective."""
        assert self.val_dataset is not None
        samples = self.run.eval_iters * self.plan.global_batch
        return evaluate_loss(
            self.runner, self.val_dataset, self.plan.micro_batch, samples, num_workers=self.run.num_workers
        )

    def _validate(self) -> tuple[LossMetrics, bool]:
        paused = time.perf_counter()
        metrics = self.validate()
        self._interval_start += time.perf_counter() - paused  # throughput is training's alone
        log.info(
            "validation at step %d | loss %.6E | perplexity %.6E (%d tokens)",
            self.state.step, metrics.loss, metrics.perplexity, metrics.targets,
        )  # fmt: skip
        self.last_validation = metrics
        improved = metrics.loss < self.state.best_loss
        if improved:
            self.state.best_loss = metrics.loss
        return metrics, improved

    def _save(self, *, best: bool) -> None:
        """Save the present state unless it is saved already."""
        if self.state.step == self._saved_step:
            return
        started = time.perf_counter()
        state = self.state
        state.scaler = self.runner.precision.scaler.state()
        document = {
            "step": state.step,
            "applied_steps": state.applied_steps,
            "samples": state.samples,
            "best_loss": state.best_loss if math.isfinite(state.best_loss) else None,
            "scaler": state.scaler,
            "world_size": self.runner.world.size,
            "config": self.config.plain,
        }
        self.checkpointer.save(state.step, self.runner.shards(), document, best=best)
        self._saved_step = state.step
        self._interval_start += time.perf_counter() - started
        log.info("saving %s", folders.step_folder(self.folder.checkpoints, state.step))

    def _write_assets(self, folder: Path) -> None:
        """What makes a checkpoint a Hugging Face folder: the model's configuration and the tokenizer's files."""
        self.runner.model.save_config(folder)
        if self.dataset.tokenizer_path is not None:
            for path in self.dataset.tokenizer_path.iterdir():
                if path.is_file():
                    (folder / path.name).write_bytes(path.read_bytes())
