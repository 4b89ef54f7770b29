"""The training loop. One for every runner, model and dataset; it asks none of them what it is."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path

from crosstrain.checkpoint import folders
from crosstrain.checkpoint.checkpointer import Checkpointer
from crosstrain.checkpoint.manifest import FrozenParameter
from crosstrain.checkpoint.run_folder import RunFolder
from crosstrain.config.batch import BatchPlan
from crosstrain.config.load import Config
from crosstrain.config.run_options import Every
from crosstrain.config.schema import to_plain
from crosstrain.data.dataset import Dataset
from crosstrain.data.loader import Step, training_steps
from crosstrain.distributed.launch.signals import StopRequest
from crosstrain.engine.runner import Runner
from crosstrain.inference.perplexity import LossMetrics, evaluate_loss
from crosstrain.monitor.metrics import Row, StepMetrics
from crosstrain.monitor.profiler import Profiler
from crosstrain.monitor.reporter import Reporter
from crosstrain.training.bad_steps import BadSteps, RollBack
from crosstrain.training.callback import Callbacks
from crosstrain.training.prompt_samples import PromptSamples
from crosstrain.training.state import State, reload, restore, starting_point
from crosstrain.utils.errors import CheckpointError, TrainingError
from crosstrain.utils.logging import log
from crosstrain.utils.trust import signature
from crosstrain.utils.units import disjoint, finite


@dataclass
class Trainer:
    """The loop over the steps of a run, with the parts that `training.worker` builds; every rank calls `fit`."""

    config: Config
    runner: Runner  # holds the model and the optimizer, filled with the weights of `state`
    stop: StopRequest
    folder: RunFolder
    dataset: Dataset
    val_dataset: Dataset | None
    plan: BatchPlan
    max_iters: int
    schedule: Callable[[int], float]  # learning rate of the n-th applied step
    state: State
    frozen: dict[str, FrozenParameter]  # parameters from pretrained folders, which checkpoints need not hold
    checkpointer: Checkpointer
    saved_step: int | None  # the last one that the run's folder has a checkpoint of
    bad_steps: BadSteps
    reporter: Reporter
    profiler: Profiler
    samples: PromptSamples
    start: Path | None  # the checkpoint that training goes on from

    stopped: bool = field(default=False, init=False)  # a signal ended the run early, the same on every rank
    last_validation: LossMetrics | None = field(default=None, init=False)  # of the present step
    last_samples: list[dict[str, str]] = field(default_factory=list, init=False)  # of the last validation

    def __post_init__(self) -> None:
        self.run, self.is_main = self.config.run, self.runner.world.rank == 0
        self._end_reason, self._pointers = "", set[str]()
        self._samples_before = self.state.samples
        self.callbacks = Callbacks(self, self.start)

    def fit(self) -> State:
        """Train to `max_iters` or until a stop is asked for, and save; returns the final state."""
        batches = self.batches()
        self.callbacks.call("on_start")
        if self.bad_steps.rolls_back and self.saved_step is None:
            self._save(background=False)
            self.checkpointer.wait()  # from here on there is one to go back to
        self.reporter.begin_interval()
        last: StepMetrics | None = None
        try:
            while self.state.step < self.max_iters and not self.state.ended_with:
                try:
                    with self.profiler.step(self.state.step + 1):
                        metrics = self.train_step(batches)
                except RollBack as bad:
                    batches = self._go_back(bad)
                    continue
                if metrics is None:
                    self.stopped = not self._ends()
                    if last is not None and not self.stopped and self.reporter.tracked_step < last.step:
                        self.reporter.track({"step": last.step} | self._log(last))
                    break
                last = metrics
                with self.reporter.paused():
                    self.profiler.write(after=self.state.step)
                self.last_validation = None
                self.reporter.advance(metrics)
                row = self._log(metrics) if self._logs(self.state.step) else {}
                if self._due(self.run.eval_interval) or (self.ends_validated and self.state.step == self.max_iters):
                    row |= self._validate()
                    if self.state.improves(row["val_loss"]) and self.run.save_best:
                        self.save_as("best")
                if row:
                    self._keep_folder()
                    self.reporter.track({"step": self.state.step} | row)
                if self._due(self.run.save_interval) or self._pointers:
                    self._save(background=self.run.save_in_background)
            self.profiler.write()  # of a window that was not gone through
            self._save(background=False)
            self.checkpointer.wait()
            self.callbacks.call("on_end")
            if lost := self.runner.world.broadcast(self.folder.lost):
                raise TrainingError(lost)
        except TrainingError:  # raised on every rank alike; what was being saved is worth having
            self.checkpointer.wait()
            raise
        finally:
            self.reporter.close(ended=bool(self.state.ended_with))
        if self.stopped:
            log.info("stopped at step %d; the same command, without --fresh, goes on from there", self.state.step)
        if self.state.ended_with:
            log.info("a callback ended the run at step %d; it goes on only with other run.callbacks", self.state.step)
        return self.state

    def end(self, reason: str) -> None:
        """End training after this step as if it were the last one; for callbacks, and one rank's is enough."""
        self._end_reason = reason

    def save_as(self, pointer: str = "latest") -> None:
        """Save after this step; the file `checkpoints/<pointer>` will name it. For callbacks, on every rank alike."""
        self._pointers.add(pointer)

    def _ends(self) -> bool:
        """True, and noted, if a callback of some rank has asked for the end. Collective."""
        reasons = list(filter(None, self.runner.world.all_gather(self._end_reason)))
        if reasons and not self.state.ended_with:
            self.state.ended_with = to_plain(self.run.callbacks)
            log.info("training ends after step %d: %s", self.state.step, reasons[0])
        return bool(reasons)

    def _log(self, metrics: StepMetrics) -> Row:
        metrics.recorded = self._scalars()
        return self.reporter.log(metrics)

    def _scalars(self) -> dict[str, float]:
        return reduce(disjoint, self.callbacks.call("take_scalars"), {})

    def _go_back(self, bad: RollBack) -> Iterator[Step]:
        """Go back to the last checkpoint, as a new start would; returns the micro batches from there on."""
        with suppress(CheckpointError):  # of a save that failed, which was logged
            self.checkpointer.wait()
        folder = self.folder
        checkpoint = starting_point(folder.checkpoints, self.run.resume_from, self.runner.world, folder.run_id)
        assert checkpoint is not None  # one was saved before the first step
        left_out = self.bad_steps.go_back(checkpoint, bad, self.state)
        reload(self.runner, checkpoint, self.frozen)
        self.state = restore(checkpoint, self.runner)
        self.state.left_out = left_out
        self.saved_step = self.state.step
        self.reporter.go_back(self.state.step)
        self._end_reason = ""
        self.callbacks = Callbacks(self, checkpoint)
        self.callbacks.call("on_start")
        return self.batches()

    def batches(self) -> Iterator[Step]:
        """This rank's micro batches, step by step, from the state's sample on."""
        lengths = map(self._length, itertools.count(self.state.step + 1)) if self.run.curriculum else None
        return training_steps(
            self.dataset, self.plan, seed=self.run.seed, start=self.state.samples,
            dp_rank=self.runner.dp.rank, num_workers=self.run.num_workers,
            lengths=lengths, left_out=self.state.left_out, num_targets=self.runner.model.num_targets,
            vocab_size=self.runner.model.vocab_size,
        )  # fmt: skip

    def _length(self, step: int) -> int:
        """Tokens of a sample in a step that a curriculum shortens."""
        assert self.run.curriculum is not None
        return self.run.curriculum.length(step, self.run.curriculum.check(self.dataset.sequence_length))

    def train_step(self, batches: Iterator[Step]) -> StepMetrics | None:
        """Attempt one step; returns its numbers, or None, and does nothing, if any rank was asked to stop."""
        state, runner, timers = self.state, self.runner, self.runner.timers
        timers.reset(synchronize=self._logs(state.step + 1))
        with timers("batch generator"):
            with timers("data loader"):
                batch = next(batches)
            targets, tokens, stop = self._agree(batch)
        if stop:
            return None
        rate = self.schedule(state.applied_steps + 1)
        runner.set_learning_rate(rate)
        self.callbacks.call("before_step")
        scale = runner.precision.scaler.scale
        runner.count_choices(batch)
        loss = runner.forward_backward(batch, max(targets, 1))
        problem = self.bad_steps.check_loss(loss, state)
        self.callbacks.call("after_backward")
        with timers("optimizer"):
            result = runner.optimizer_step(apply=problem is None)
            for routers in runner.model.all_routers():
                routers.end_step(runner.world.process_group, result.applied)

        state.step += 1
        self._samples_before, state.samples = state.samples, batch.numbers[-1] + 1
        state.applied_steps += result.applied
        self.bad_steps.record(state, batch, loss, problem, result)
        metrics = StepMetrics(
            step=state.step, loss=finite(loss), grad_norm=finite(result.grad_norm), loss_scale=scale,
            lr=rate if result.applied else self.schedule(state.applied_steps),
            samples=state.samples, skipped_steps=state.step - state.applied_steps,
            sequence_length=self._length(state.step) if self.run.curriculum else None,
        )  # fmt: skip
        counted = tokens if runner.model.predicts_tokens else len(batch.numbers)
        self.reporter.measure(metrics, counted, self.dataset.sequence_length)
        self.callbacks.call("after_step", metrics)
        return metrics

    def _agree(self, batch: Step) -> tuple[int, int, bool]:
        """Targets and target tokens of the step, before the first backward, and whether any rank was asked to stop."""
        world, dp = self.runner.world, self.runner.dp
        mine = sum(micro_batch.num_targets for micro_batch in batch)
        tokens = sum(self.runner.model.num_tokens(micro_batch.data) for micro_batch in batch)
        # In one exchange, because at each the ranks wait for the slowest. Ranks beyond `dp` see the same samples again.
        asked = bool(self.stop or self._end_reason) or self.folder.lost is not None
        *sums, stops = world.all_reduce_sum(mine, tokens, asked)
        targets, tokens = (int(total) // (world.size // dp.size) for total in sums)
        return targets, tokens, stops > 0

    def _logs(self, step: int) -> bool:
        """True for one step in `log_interval`, and for the last one, so that the shortest run logs something."""
        return step % self.run.log_interval == 0 or step == self.max_iters

    def _due(self, interval: Every) -> bool:
        if interval == "epoch":
            size = len(self.dataset)
            return self.state.samples // size > self._samples_before // size
        return interval is not None and self.state.step % interval == 0

    # ---- validation and saving

    @property
    def ends_validated(self) -> bool:
        """True unless the run is without validation, or too short for its first one, such as a smoke run."""
        interval = self.run.eval_interval
        return interval == "epoch" or (interval is not None and interval <= self.max_iters)

    def validate(self, dataset: Dataset | None = None) -> LossMetrics:
        """Loss on the first `eval_iters` global batches of a split, by default the validation split. Collective."""
        chosen = dataset or self.val_dataset
        assert chosen is not None
        samples = self.run.eval_iters * self.plan.global_batch
        return evaluate_loss(self.runner, chosen, self.plan.micro_batch, samples, self.run.num_workers)

    def _validate(self) -> Row:
        """Validate, draw samples, and log; returns what trackers record of it."""
        with self.reporter.paused():
            metrics = self.last_validation = self.validate()
            self.last_samples = self.samples.draw()
        log.info("validation at step %d | %s", self.state.step, metrics.line(".6E"))
        row: Row = {f"val_{name}": value for name, value in metrics.named.items()}
        self.callbacks.call("on_validation", row)
        row = disjoint(row, self._scalars())
        return row | ({"generated": self.last_samples} if self.last_samples else {})

    def _save(self, *, background: bool) -> None:
        """Save the present state unless it is saved already."""
        self._keep_folder()
        folder, state = self.folder, self.state
        pointers, self._pointers = self._pointers, set()
        if saved := state.step == self.saved_step:
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
        self.callbacks.call("on_save", folders.step_folder(self.folder.checkpoints, state.step))
        self._ends()  # a checkpoint of a last step says so
        state.callbacks = dict(zip(self.callbacks.by_name, self.callbacks.call("saved_state"), strict=True))
        log.info("saving %s/checkpoints/step_%06d", self.folder.address, state.step)
        config = self.config.plain
        signed = {"signature": signature(config)} if self.is_main else {}
        document = state.document(world_size=self.runner.world.size, config=config, **signed)
        with self.reporter.paused():
            shards = [s for s in self.runner.shards() if s.name not in self.frozen]
            self.checkpointer.save(
                state.step, shards + self.callbacks.shards(), document, frozen=self.frozen, pointers=pointers,
                keep=set().union(*self.callbacks.call("keep")), background=background,
            )  # fmt: skip
        self.saved_step = state.step

    def _keep_folder(self) -> None:
        """Have the run's folder, if it was deleted or moved, back or followed, on rank 0."""
        if self.is_main and self.folder.keep():
            log.warning("%s", self.folder.lost or f"{self.folder.path} was deleted, and is made again")
            self.reporter.restart_trackers()
