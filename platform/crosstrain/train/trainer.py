"""The training loop. One, for every runner, model and dataset; it asks none of them what it is."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from crosstrain.checkpoint import folders
from crosstrain.checkpoint.checkpointer import Checkpointer, Retention
from crosstrain.checkpoint.run_folder import RunFolder
from crosstrain.config.batch import BatchPlan
from crosstrain.config.load import Config
from crosstrain.data.loader import MicroBatch, training_steps
from crosstrain.data.skip_ranges import take
from crosstrain.data.splits import open_split
from crosstrain.distributed.launch.signals import StopRequest
from crosstrain.engine.build import build_model, check_tokenizer
from crosstrain.engine.lr_schedule import make_schedule
from crosstrain.engine.runner import Runner
from crosstrain.inference.perplexity import LossMetrics, evaluate_loss
from crosstrain.monitor.profiler import Profiler
from crosstrain.monitor.reporter import Reporter
from crosstrain.train.bad_steps import Attempt, BadSteps, RollBack
from crosstrain.train.prompt_samples import PromptSamples
from crosstrain.train.resume import reload, starting_point
from crosstrain.train.state import State
from crosstrain.utils.assets import TOKENIZER_FILES, copy_files, plain_files
from crosstrain.utils.errors import CheckpointError, TrainingError
from crosstrain.utils.logging import log, set_up_logging
from crosstrain.utils.trust import signature
from crosstrain.utils.units import finite


class Trainer:
    """Trains what a configuration says, from where its folder says.

    Collective: every rank makes one and calls `fit`. With `quiet` nothing is said but warnings.
    """

    def __init__(self, config: Config, runner: Runner, stop: StopRequest, quiet: bool = False) -> None:
        self.config, self.runner, self.stop = config, runner, stop
        run = self.run = config.run
        self.folder = RunFolder(run.output_dir)
        self.is_main = runner.world.rank == 0
        if self.is_main:
            self.folder.create(config.plain, folders.newest_run(self.folder.checkpoints))
        self.folder.check_shared(runner.world)
        self.folder.run_id = runner.world.broadcast(self.folder.run_id)
        log_file = self.folder.log if self.is_main else None
        set_up_logging(log_file, quiet=quiet or not self.is_main, write=self.folder.append)

        self.dataset = open_split(config, "train")
        self.val_dataset = open_split(config, "val") if run.eval_interval else None
        tokenizer = self.dataset.tokenizer_path
        self.tokenizer_files = plain_files(tokenizer, TOKENIZER_FILES) if tokenizer is not None else []
        self.plan = BatchPlan.of(run, runner.dp.size)
        self.max_iters = self.plan.steps(run, len(self.dataset))
        if run.curriculum is not None:
            run.curriculum.check(self.dataset.sequence_length)
        self.schedule = make_schedule(config, self.max_iters)

        start = self._starting_point()
        if start is not None:
            check_tokenizer(start, self.dataset)
        self.frozen = build_model(config, runner, start, for_training=True)
        self.state = self._restore(start)
        self.checkpointer = Checkpointer(
            self.folder.checkpoints, runner.new_group(), Retention(run.keep_last, run.keep_every), self._write_assets,
            self.folder.run_id,
        )  # fmt: skip
        self._saved_step = self.state.step if start and start.parent == self.folder.checkpoints else None
        self.bad_steps = BadSteps(runner, self.dataset, self.folder if self.is_main else None)
        self.profiler = Profiler(run.profile, self.folder.profile, runner.world.rank, runner.device)
        self._report()
        self.stopped = False  # whether a signal ended the run early, the same on every rank
        self.last_validation: LossMetrics | None = None  # of the present step
        self.samples = PromptSamples(runner, run, self.dataset.tokenizer_path)
        self.last_samples: list[dict[str, str]] = []  # of the last validation
        self._announce()

    # ---- starting

    def _starting_point(self) -> Path | None:
        folder = self.folder
        return starting_point(folder.checkpoints, self.run.resume_from, self.runner.world, folder.run_id)

    def _restore(self, checkpoint: Path | None) -> State:
        if checkpoint is None:
            return State()
        state = State.load(checkpoint)
        self.runner.precision.scaler.load_state(state.scaler)
        log.info("resuming %s at step %d (sample %d)", checkpoint, state.step, state.samples)
        return state

    def _report(self) -> None:
        """Begin to report, from where the state stands."""
        self.reporter = Reporter(
            self.runner, self.config, self.folder, self.state.step, self.max_iters, self.plan.global_batch
        )

    def _announce(self) -> None:
        runner = self.runner
        mine = {
            n: (p.requires_grad, runner.full_shape(p).numel()) for n, p in runner.model.canonical_parameters().items()
        }
        parameters = {name: count for held in runner.world.all_gather(mine) for name, count in held.items()}
        log.info(
            "%s: %s parameters (%s trainable), runner %s on %d %s worker(s), %s",
            self.config.model.name,
            f"{sum(numel for _, numel in parameters.values()):,}",
            f"{sum(numel for trainable, numel in parameters.values() if trainable):,}",
            self.config.runner.name,
            runner.world.size,
            runner.device.type,
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
        batches = self.batches()
        if self.bad_steps.rolls_back and self._saved_step is None:
            self._save(best=False, background=False)
            self.checkpointer.wait()  # from here on there is one to go back to
        self.reporter.begin_interval()
        try:
            while self.state.step < self.max_iters:
                try:
                    with self.profiler.step(self.state.step + 1):
                        row = self.train_step(batches)
                except RollBack as bad:
                    batches = self._go_back(bad)
                    continue
                if row is None:
                    self.stopped = True
                    break
                if self.profiler.ends_at(self.state.step):
                    with self.reporter.paused():
                        self.profiler.write()
                self.last_validation = None
                self.reporter.advance(row)
                logged: dict[str, Any] = {}
                if self._logs(self.state.step):
                    self.reporter.log(row)
                    logged = row
                improved = False
                if self._due(self.run.eval_interval):
                    metrics, improved = self._validate()
                    logged |= {"val_loss": metrics.loss, "val_perplexity": metrics.perplexity}
                    if self.last_samples:
                        logged["generated"] = self.last_samples
                if logged:
                    self._keep_folder()
                    self.reporter.track({"step": self.state.step} | logged)
                if self._due(self.run.save_interval) or (improved and self.run.save_best):
                    self._save(best=improved and self.run.save_best, background=self.run.save_in_background)
            self.profiler.write()  # of a window that was not gone through
            self._save(best=False, background=False)
            self.checkpointer.wait()
            if lost := self.runner.world.broadcast(self.folder.lost):
                raise TrainingError(lost)
        except TrainingError:  # raised on every rank alike; what was being saved is worth having
            self.checkpointer.wait()
            raise
        finally:
            self.reporter.close()
        if self.stopped:
            log.info("stopped at step %d; the same command goes on from there", self.state.step)
        return self.state

    def _go_back(self, bad: RollBack) -> Iterator[list[MicroBatch]]:
        """To the last checkpoint, as a new start would; the micro batches from there on."""
        with suppress(CheckpointError):  # of a save that failed, which was logged
            self.checkpointer.wait()
        checkpoint = self._starting_point()
        assert checkpoint is not None  # one was saved before the first step
        left_out = self.bad_steps.go_back(checkpoint, bad, self.state)
        reload(self.runner, checkpoint, self.frozen)
        self.state = self._restore(checkpoint)
        self.state.left_out = left_out
        self._saved_step = self.state.step
        self.reporter.close()
        self._report()
        return self.batches()

    def batches(self) -> Iterator[list[MicroBatch]]:
        """This rank's micro batches, step by step, from where the state stands."""
        lengths = map(self._length, itertools.count(self.state.step + 1)) if self.run.curriculum else None
        return training_steps(
            self.dataset, self.plan, seed=self.run.seed, start=self.state.samples,
            dp_rank=self.runner.dp.rank, num_workers=self.run.num_workers,
            lengths=lengths, left_out=self.state.left_out,
        )  # fmt: skip

    def _length(self, step: int) -> int:
        """Tokens of a sample in a step that a curriculum shortens."""
        assert self.run.curriculum is not None
        return self.run.curriculum.length(step, self.run.curriculum.check(self.dataset.sequence_length))

    def train_step(self, batches: Iterator[list[MicroBatch]]) -> dict[str, Any] | None:
        """One attempted step; its numbers, or None, and nothing done, if any rank was asked to stop."""
        state, runner, timers = self.state, self.runner, self.runner.timers
        timers.reset(synchronize=self._logs(state.step + 1))
        with timers("batch generator"):
            with timers("data loader"):
                micro_batches = next(batches)
            targets, stop = self._agree(micro_batches)
        if stop:
            return None
        rate = self.schedule.rate(state.applied_steps + 1)
        runner.set_learning_rate(rate)
        scale = runner.precision.scaler.scale
        loss = runner.forward_backward(micro_batches, max(targets, 1))
        problem = self.bad_steps.judge(loss, state)
        with timers("optimizer"):
            result = runner.optimizer_step(apply=problem is None)

        numbers = take(state.samples, self.plan.global_batch, state.left_out)
        state.step += 1
        state.samples = numbers[-1] + 1
        state.applied_steps += result.applied
        self.bad_steps.account(state, Attempt(micro_batches, numbers, loss, problem, result))
        return {
            "step": state.step,
            "loss": finite(loss),
            "lr": rate if result.applied else self.schedule.rate(state.applied_steps),
            "grad_norm": finite(result.grad_norm),
            "loss_scale": scale,
            "samples": state.samples,
            "skipped_steps": state.step - state.applied_steps,
            **({"sequence_length": self._length(state.step)} if self.run.curriculum else {}),
            **self.reporter.measure(targets, self.dataset.sequence_length),
        }

    def _agree(self, micro_batches: list[MicroBatch]) -> tuple[int, bool]:
        """Target tokens of the whole step, known before the first backward, and whether any rank was asked to stop."""
        for micro_batch in micro_batches:
            micro_batch.num_targets = self.runner.model.num_targets(micro_batch.data)
        mine = sum(m.num_targets for m in micro_batches)
        world, dp = self.runner.world, self.runner.dp
        # In one exchange, because at each the ranks wait for the slowest. Ranks beyond `dp` see the same samples again.
        targets, stops = world.all_reduce_sum(mine, bool(self.stop) or self.folder.lost is not None)
        return int(targets) // (world.size // dp.size), stops > 0

    def _logs(self, step: int) -> bool:
        """Whether a step is logged: one in `log_interval`, and the last, so that the shortest run says something."""
        return step % self.run.log_interval == 0 or step == self.max_iters

    def _due(self, interval: int | None) -> bool:
        return interval is not None and self.state.step % interval == 0

    # ---- validation and saving

    def validate(self) -> LossMetrics:
        """Loss on the validation split's first `eval_iters` global batches. Collective."""
        assert self.val_dataset is not None
        samples = self.run.eval_iters * self.plan.global_batch
        return evaluate_loss(
            self.runner, self.val_dataset, self.plan.micro_batch, samples, num_workers=self.run.num_workers
        )

    def _validate(self) -> tuple[LossMetrics, bool]:
        with self.reporter.paused():
            metrics = self.validate()
            self.last_samples = self.samples.draw()
        log.info(
            "validation at step %d | loss %.6E | perplexity %.6E (%d tokens)",
            self.state.step, metrics.loss, metrics.perplexity, metrics.targets,
        )  # fmt: skip
        self.last_validation = metrics
        return metrics, self.state.improves(metrics.loss)

    def _save(self, *, best: bool, background: bool) -> None:
        """Save the present state unless it is saved already."""
        self._keep_folder()
        folder, state = self.folder, self.state
        if saved := state.step == self._saved_step:
            with suppress(CheckpointError):  # it failed, or was deleted since: it is worth another attempt
                self.checkpointer.wait()
            saved = folders.step_folder(folder.checkpoints, state.step).exists()
        path, saved = self.runner.world.broadcast((folder.path, saved))
        if saved:
            return
        if path != self.checkpointer.root.parent:
            with suppress(CheckpointError):  # of a save that was under way, which was logged
                self.checkpointer.wait()
            folder.go_to(path)
            self.checkpointer.root, self.profiler.folder = folder.checkpoints, folder.profile
        state.scaler = self.runner.precision.scaler.state()
        config = self.config.plain
        signed = {"signature": signature(config)} if self.is_main else {}
        document = state.document(world_size=self.runner.world.size, config=config, **signed)
        with self.reporter.paused():
            shards = [s for s in self.runner.shards() if s.name not in self.frozen]
            self.checkpointer.save(state.step, shards, document, frozen=self.frozen, best=best, background=background)
        self._saved_step = state.step
        log.info("saving %s", folders.step_folder(self.folder.checkpoints, state.step))

    def _keep_folder(self) -> None:
        """Have the run's folder, if it was deleted or moved, back or followed, on rank 0."""
        if self.is_main and self.folder.keep():
            log.warning("%s", self.folder.lost or f"{self.folder.path} was deleted, and is made again")
            self.reporter.restart_trackers()

    def _write_assets(self, folder: Path) -> None:
        """What makes a checkpoint a Hugging Face folder: the model's configuration and the tokenizer's files."""
        self.runner.model.save_config(folder)
        copy_files(self.tokenizer_files, folder)
