"""The training loop, shared by all runners, models and datasets without special cases for any of them."""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import InitVar, dataclass, field
from itertools import count
from pathlib import Path

from crosstrain.checkpoint.checkpointer import Checkpointer
from crosstrain.checkpoint.manifest import FrozenParameter
from crosstrain.checkpoint.run_folder import RunFolder
from crosstrain.config.batch import BatchPlan
from crosstrain.config.load import Config
from crosstrain.config.run_options import Every
from crosstrain.config.schema import to_plain
from crosstrain.data.dataset import Dataset
from crosstrain.data.loader import training_steps
from crosstrain.distributed.group import Group
from crosstrain.distributed.launch.signals import StopRequest
from crosstrain.engine.runner import Runner
from crosstrain.inference.policy import Policy
from crosstrain.monitor.metrics import Row, StepMetrics
from crosstrain.monitor.throughput import Throughput
from crosstrain.training.bad_steps import RollBack
from crosstrain.training.callback import HookKinds, Hooks
from crosstrain.training.hook_order import AFTER_CALLBACKS, BEFORE_CALLBACKS
from crosstrain.training.state import State, reload, restore, starting_point
from crosstrain.utils.errors import CheckpointError, TrainingError
from crosstrain.utils.logging import log
from crosstrain.utils.types import Step
from crosstrain.utils.units import finite


@dataclass(kw_only=True)
class Trainer:
    """The loop over the steps of a run; `training.worker` builds its parts, and every rank calls `fit`.

    Everything that is not needed to update the weights is a hook; `training/hook_order.py` lists the platform's hooks.
    """

    config: Config
    runner: Runner  # holds the model and the optimizer, with the weights that belong to `state`
    stop: StopRequest
    folder: RunFolder
    dataset: Dataset
    val_dataset: Dataset | None
    plan: BatchPlan
    max_iters: int
    schedule: Callable[[int], float]  # learning rate of the n-th applied step
    state: State
    frozen: dict[str, FrozenParameter]  # frozen parameters from pretrained folders, to be left out of checkpoints
    checkpointer: Checkpointer
    saved_step: int | None  # step of the last checkpoint in the run's folder; None: no checkpoint
    start: Path | None  # the checkpoint to resume from; None: a new run
    hooks_before: InitVar[HookKinds] = BEFORE_CALLBACKS  # platform hooks called before the run's callbacks
    hooks_after: InitVar[HookKinds] = AFTER_CALLBACKS  # platform hooks called after the run's callbacks

    stopped: bool = field(default=False, init=False)  # a signal ended the run early; all ranks have the same value
    settled: int = field(default=0, init=False)  # updates of the runner that the whole state contains
    ranks: Group = field(default_factory=Group, init=False)  # the ranks that take the current step together
    row: Row = field(default_factory=dict, init=False)  # metrics of the current step for trackers; filled by hooks
    pointers: set[str] = field(default_factory=set, init=False)  # pointer files that will point to the next checkpoint

    def __post_init__(self, hooks_before: HookKinds, hooks_after: HookKinds) -> None:
        self.run, self.is_main = self.config.run, self.runner.world.rank == 0
        self._end_reason = ""
        self._samples_before = self.state.samples
        self.throughput = Throughput(self.runner)
        self.hooks = Hooks(self, hooks_before, hooks_after)

    def fit(self) -> State:
        """Train until `max_iters` or a stop request, then save and return the final state."""
        try:
            self.hooks.call("on_start")
            batches = self.batches()
            while self.state.step < self.max_iters and not self.state.ended_with:
                try:
                    if self.train_step(batches) is None:  # a rank got a request to stop
                        self.stopped = not self.agree_to_end()
                        if self.stopped:
                            self.stop.confirm(self.runner.world)
                        break
                except RollBack as bad:
                    batches = self._go_back(bad)
            with self.runner.merged():
                self.hooks.call("before_end")
                self.hooks.call("on_end")
        except TrainingError:  # finish the save in progress; a failed save was already logged
            with suppress(CheckpointError):
                self.checkpointer.wait()
            raise
        finally:
            self.hooks.call("close")
        return self.state

    def train_step(self, batches: Iterator[Step]) -> StepMetrics | None:
        """Attempt one step and return its metrics. If any rank got a request to stop, take no step and return None."""
        state, runner, timers = self.state, self.runner, self.runner.timers
        self.ranks = runner.together
        self.hooks.call("before_batch")
        timers.reset(synchronize=self.logs(state.step + 1))
        with timers("batch generator"):
            with timers("data loader"):
                batch = next(batches)
            targets, tokens, stop = self._agree(batch)
        if stop:
            return None
        rate = self.schedule(state.applied_steps + 1)
        runner.set_learning_rate(rate)
        self.hooks.call("before_step", batch)
        scale = runner.precision.scaler.scale
        loss = runner.forward_backward(batch, max(targets, 1))
        problems = self.hooks.call("after_backward", batch, loss)
        with timers("optimizer"):
            result = runner.optimizer_step(apply=not any(problems))
            for routers in runner.model.structure.routers():
                routers.end_step(self.ranks.process_group, result.applied)

        state.step += 1
        self._samples_before, state.uses = state.samples, (batch.use + 1) % self.plan.uses
        state.samples = batch.numbers[0] if state.uses else batch.numbers[-1] + 1
        # A step without all ranks always counts, so that the count is the same on all ranks.
        state.applied_steps += result.applied or self.ranks is not runner.world
        metrics = StepMetrics(
            step=state.step,
            loss=finite(loss),
            grad_norm=finite(result.grad_norm),
            loss_scale=scale,
            lr=rate if result.applied else self.schedule(state.applied_steps),
            applied=result.applied,
            samples=state.samples,
            skipped_steps=state.step - state.applied_steps,
            sequence_length=self._length(state.step) if self.run.curriculum else None,
        )
        counted = tokens if runner.model.predicts_tokens else len(batch.numbers)
        self.throughput.measure(metrics, counted, self.dataset.sequence_length)
        self.hooks.call("after_step", metrics)
        return metrics

    # ---- for hooks

    def end(self, reason: str) -> None:
        """End training after this step as if it were the last step; a call on one rank is enough."""
        self._end_reason = reason

    def agree_to_end(self) -> bool:
        """Return True if a hook on any rank has called `end`, and record this in the state. Collective."""
        reasons = list(filter(None, self.runner.world.all_gather(self._end_reason)))
        if reasons and not self.state.ended_with:
            self.state.ended_with = to_plain(self.run.callbacks)
            log.info("training ends after step %d: %s", self.state.step, reasons[0])
        return bool(reasons)

    def complete_state(self) -> State:
        """Return the state after it has taken over those of the loss scaler, the callbacks and the runner."""
        self.state.scaler = self.runner.precision.scaler.state()
        self.state.callbacks = self.hooks.saved_states()
        self.state.runner = {self.run.runner.name: json.loads(json.dumps(self.runner.state))}
        return self.state

    def save_as(self, pointer: str = "latest") -> None:
        """Save after this step, and set `checkpoints/<pointer>` to the checkpoint. Call this on every rank."""
        self.pointers.add(pointer)

    def logs(self, step: int) -> bool:
        """Return True for every `log_interval`-th step and for the last step, so that every run logs at least once."""
        return step % self.run.log_interval == 0 or step == self.max_iters

    def due(self, interval: Every) -> bool:
        """Return True if the last step completed an interval of steps or an epoch; False if `interval` is None."""
        if interval == "epoch":
            size = len(self.dataset)
            return self.state.samples // size > self._samples_before // size
        return interval is not None and self.state.step % interval == 0

    # ---- samples

    def batches(self) -> Iterator[Step]:
        """Yield this rank's micro batches of each step, starting at the sample `state.samples`.

        Steps with the same samples follow each other (`BatchPlan.uses`), and a resumed run begins with the next one.
        """
        lengths = map(self._length, count(self.state.step + 1, self.plan.uses)) if self.run.curriculum else None
        steps = training_steps(
            self.dataset,
            self.plan,
            seed=self.run.seed,
            start=self.state.samples,
            dp_rank=self.runner.dp.rank,
            num_workers=self.run.num_workers,
            lengths=lengths,
            left_out=self.state.left_out,
            vocab_size=self.runner.model.vocab_size,
            consecutive=self.runner.capabilities.consecutive_micro_batches,
        )
        objective, timers = self.runner.objective, self.runner.timers
        policy = Policy(self.runner, self.dataset)
        for read in steps:
            step, first = read, self.state.uses if read.numbers[0] == self.state.samples else 0
            for step.use in range(first, self.plan.uses):
                begun = time.perf_counter()
                step = objective.begin_step(step, policy)
                timers.add("data loader", begun - time.perf_counter())  # subtract the time of generation
                for micro_batch in step:
                    micro_batch.num_targets = objective.num_targets(micro_batch.data)
                yield step

    def _length(self, step: int) -> int:
        """Return the sequence length of a step under the curriculum; steps with the same samples have the same."""
        assert self.run.curriculum is not None
        return self.run.curriculum.length(
            step - (step - 1) % self.plan.uses, self.run.curriculum.check(self.dataset.sequence_length)
        )

    def _agree(self, batch: Step) -> tuple[int, int, bool]:
        """Return the step's number of targets and of target tokens, and whether any rank got a request to stop.

        In a step that a team takes alone, assume that the other ranks have as many targets on average, and that none
        got a request to stop.
        """
        ranks, world, dp = self.ranks, self.runner.world, self.runner.dp
        mine = sum(micro_batch.num_targets for micro_batch in batch)
        tokens = sum(self.runner.model.num_targets(micro_batch.data) for micro_batch in batch)
        # There is only one collective, because each collective makes all ranks wait for the slowest. If several ranks
        # have the same samples, the sum over `world` counts these samples several times.
        *sums, stops = ranks.all_reduce_sum(mine, tokens, bool(self.stop or self._end_reason), tag="targets of a step")
        targets, tokens = (int(total) * dp.size // ranks.size for total in sums)
        return targets, tokens, stops > 0 and ranks is world

    def _go_back(self, bad: RollBack) -> Iterator[Step]:
        """Reload the last checkpoint, as after a restart, and return the micro batches of the following steps."""
        with suppress(CheckpointError):  # a failed save was already logged
            self.checkpointer.wait()
        checkpoint = starting_point(
            self.folder.checkpoints, self.run.resume_from, self.runner.world, self.folder.run_id
        )
        assert checkpoint is not None  # with roll_back, a checkpoint was saved before the first step
        left_out = bad.left_out(checkpoint, self.state)
        reload(self.runner, checkpoint, self.frozen)
        self.state = restore(checkpoint, self.runner)
        self.state.left_out = left_out
        self.saved_step = self.state.step
        self._end_reason, self.row = "", {}
        self.hooks.load(checkpoint)
        self.hooks.call("on_start")
        return self.batches()
