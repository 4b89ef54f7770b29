"""Detect bad steps (non-finite or spiking loss), find the samples responsible, and stop, skip or roll back."""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from crosstrain.checkpoint.run_folder import RunFolder
from crosstrain.data.dataset import Dataset
from crosstrain.data.loader import MicroBatch, Step, one_sample
from crosstrain.data.skip_ranges import Ranges, leave_out, show
from crosstrain.engine.runner import Runner, StepResult
from crosstrain.train.state import State
from crosstrain.utils.errors import ConfigError, TrainingError
from crosstrain.utils.logging import log
from crosstrain.utils.units import finite

_SHOWN = 3  # suspects in a log line
_RECORDED = 100  # in the file
_NARROWED = 64  # samples that are looked at one by one
_GRADIENTS = "the gradients are not finite"


class RollBack(TrainingError):
    """Training must go back to the last checkpoint and leave out the samples `numbers`."""

    def __init__(self, message: str, numbers: Sequence[int]) -> None:
        super().__init__(message)
        self.numbers = numbers


@dataclass
class Attempt:
    """A step that was applied or not."""

    batch: Step  # this rank's micro batches, and all ranks' sample numbers
    loss: float
    problem: str | None  # why it was refused
    result: StepResult

    def place(self, state: State) -> str:
        return f"step {state.step} ({show(self.batch.numbers)})"


@dataclass
class Suspect:
    """Samples that may have caused a bad step: a micro batch, or one of its samples; mean loss per target token."""

    numbers: tuple[int, ...]
    loss: float


class BadSteps:
    """The policy of `run.on_bad_step`. Every rank has one, and all come to the same result.

    `folder` gets a file with one JSON object per bad step; None on ranks but the first. Raises ConfigError for roll
    backs over a dataset whose samples have no numbers to leave out.
    """

    def __init__(self, runner: Runner, dataset: Dataset, folder: RunFolder | None) -> None:
        self.runner, self.dataset, self.folder = runner, dataset, folder
        self.options, self.seed = runner.run.on_bad_step, runner.run.seed
        self._went_back: tuple[Path | None, int] = (None, 0)
        if self.rolls_back and not dataset.indexed:
            raise ConfigError("run.on_bad_step: a stream has no samples that roll_back could leave out: use skip")

    @property
    def rolls_back(self) -> bool:
        return self.options.policy == "roll_back"

    def check_loss(self, loss: float, state: State) -> str | None:
        """The reason not to apply a step with this loss, or None."""
        if not math.isfinite(loss):
            return "the loss is not finite"
        if self.options.spike is None:
            return None
        window = state.recent_losses[-self.options.spike_window :]
        if len(window) < self.options.spike_window:
            return None
        usual = statistics.median(window)
        if loss <= self.options.spike * usual:
            return None
        return f"the loss, {loss:.4g}, is a spike above {usual:.4g}, the median of the last {len(window)}"

    def record(self, state: State, attempt: Attempt) -> None:
        """Record an attempted step in the state, and act on a bad one. Collective where the step was bad.

        Raises RollBack under that policy, and TrainingError where training must end.
        """
        result, precision = attempt.result, self.runner.precision
        if result.applied:
            state.overflows_in_a_row = state.bad_in_a_row = 0
            if self.options.spike is not None:
                state.recent_losses = [*state.recent_losses, attempt.loss][-self.options.spike_window :]
        elif attempt.problem is None and precision.overflows:
            state.overflows_in_a_row += 1
            _end_after(
                precision.options.max_skipped, state.overflows_in_a_row, attempt.place(state),
                f"steps in a row overflowed although the loss scale fell to {precision.scaler.scale:g}, so the model "
                f"itself is diverging; lower run.init_lr, use run.amp=bf16, or look at these samples",
            )  # fmt: skip
        else:
            self._act(state, attempt, attempt.problem or _GRADIENTS)

    def _act(self, state: State, attempt: Attempt, problem: str) -> None:
        suspects = [] if problem is _GRADIENTS else self.suspects(attempt.batch)
        where, policy = attempt.place(state), self.options.policy
        sentence = f"{where}: {problem}{self._tell(suspects)}"
        self._write(state, attempt, problem, suspects)
        if policy == "stop":
            raise TrainingError(
                f"{sentence}; nothing of this step was applied and the last checkpoint is untouched: lower "
                f"run.init_lr or run.grad_norm_clip, mend the data, or let run.on_bad_step be skip or roll_back, and "
                f"run the same command again"
            )
        if policy == "roll_back":
            raise RollBack(sentence, attempt.batch.numbers)
        self._warn(f"{sentence}; the step is skipped")
        state.bad_in_a_row += 1
        state.skipped = [*state.skipped, [state.step, attempt.batch.numbers[0], attempt.batch.numbers[-1]]]
        _end_after(
            self.options.max_in_a_row, state.bad_in_a_row, sentence,
            "bad steps in a row were skipped (run.on_bad_step.max_in_a_row), so it is not the data alone; lower "
            "run.init_lr and resume from the last checkpoint",
        )  # fmt: skip

    def go_back(self, to: Path, bad: RollBack, state: State) -> Ranges:
        """Sample numbers to leave out after going back; TrainingError after too many attempts from one checkpoint."""
        count = self._went_back[1] + 1 if self._went_back[0] == to else 1
        self._went_back = to, count
        _end_after(
            self.options.max_in_a_row, count, str(bad),
            f"bad steps came after {to} (run.on_bad_step.max_in_a_row), so it is not the data alone; lower "
            f"run.init_lr, or remove that checkpoint to go on from an earlier one",
        )  # fmt: skip
        self._warn(f"{bad}; going back to {to} and leaving out {show(bad.numbers)} from there on")
        return leave_out(state.left_out, bad.numbers)

    def _warn(self, sentence: str) -> None:
        if self.runner.world.rank == 0:  # the others would say the same
            log.warning("%s", sentence)

    def suspects(self, micro_batches: list[MicroBatch]) -> list[Suspect]:
        """The samples whose loss is not finite, or else all micro batches, the highest loss first. Collective."""
        mine = {
            micro_batch.numbers: float(loss) / max(micro_batch.num_targets, 1)
            for micro_batch, loss in zip(micro_batches, self.runner.micro_losses, strict=False)
        }
        found = {numbers: loss for held in self.runner.world.all_gather(mine) for numbers, loss in held.items()}
        by_loss = sorted((Suspect(*item) for item in found.items()), key=lambda s: (-s.loss, s.numbers))
        wrong = sorted((s for s in by_loss if not math.isfinite(s.loss)), key=lambda s: s.numbers)
        return [sample for suspect in wrong for sample in self._narrowed(suspect, among=len(wrong))] or by_loss

    def _narrowed(self, suspect: Suspect, among: int) -> list[Suspect]:
        """The samples of a micro batch whose own loss is not finite; the micro batch itself where there are none."""
        if len(suspect.numbers) == 1 or len(suspect.numbers) * among > _NARROWED or not self.dataset.indexed:
            return [suspect]
        alone = []
        with self.runner.evaluating():  # without dropout, all ranks the same sample
            for number in suspect.numbers:
                batch = one_sample(self.dataset, self.seed, number)
                loss = float(self.runner.evaluate(batch)) / max(self.runner.model.num_targets(batch), 1)
                alone.append(Suspect((number,), loss))
        return [sample for sample in alone if not math.isfinite(sample.loss)] or [suspect]

    def _tell(self, suspects: list[Suspect]) -> str:
        if not suspects:
            return ""
        named = [self._name(suspect) for suspect in suspects[:_SHOWN]]
        more = f" and {len(suspects) - _SHOWN} more" if len(suspects) > _SHOWN else ""
        if all(math.isfinite(suspect.loss) for suspect in suspects):
            return f", the highest losses are those of {', '.join(named)}"
        return f", because of {', '.join(named)}{more}"

    def _name(self, suspect: Suspect) -> str:
        """`sample 7 (index 211 of the data: document 40 of data/mine; loss 9.1)`."""
        about = []
        if indices := self._indices(suspect):
            found = f"{'index' if len(indices) == 1 else 'indices'} {', '.join(map(str, indices))} of the data"
            whereabouts = self.dataset.location(indices[0]) if len(indices) == 1 else ""
            about.append(f"{found}: {whereabouts}" if whereabouts else found)
        if math.isfinite(suspect.loss):
            about.append(f"loss {suspect.loss:.4g}")
        return show(suspect.numbers) + (f" ({'; '.join(about)})" if about else "")

    def _indices(self, suspect: Suspect) -> list[int]:
        """Indices of the samples in the dataset."""
        if not self.dataset.indexed:
            return []
        return [self.dataset.training_index(self.seed, number) for number in suspect.numbers]

    def _write(self, state: State, attempt: Attempt, problem: str, suspects: list[Suspect]) -> None:
        if self.folder is None:
            return
        row: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%d %H:%M:%S"), "step": state.step, "problem": problem,
            "policy": self.options.policy, "loss": finite(attempt.loss), "grad_norm": finite(attempt.result.grad_norm),
            "samples": leave_out([], attempt.batch.numbers),
            "suspects": [
                {
                    "samples": list(suspect.numbers), "indices": indices, "loss": finite(suspect.loss),
                    "whereabouts": [self.dataset.location(index) for index in indices],
                }
                for suspect in suspects[:_RECORDED]
                for indices in [self._indices(suspect)]
            ],
        }  # fmt: skip
        try:
            self.folder.append(self.folder.bad_steps, json.dumps(row) + "\n")
        except OSError as error:
            log.warning("%s cannot be written to (%s); training goes on", self.folder.bad_steps, error.strerror)


def _end_after(limit: int, count: int, where: str, what: str) -> None:
    if count >= limit:
        raise TrainingError(f"{where}: {count} {what}")
