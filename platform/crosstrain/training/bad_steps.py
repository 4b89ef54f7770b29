"""The hook for bad steps (loss spikes, non-finite losses or gradients): find suspects, then stop, skip or roll back."""

import json
import math
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from crosstrain.data.loader import one_sample
from crosstrain.data.skip_ranges import Ranges, leave_out, show
from crosstrain.monitor.metrics import StepMetrics
from crosstrain.training.callback import Callback
from crosstrain.training.state import State
from crosstrain.utils.errors import TrainingError
from crosstrain.utils.files import append
from crosstrain.utils.logging import TIME_FORMAT, log
from crosstrain.utils.types import MicroBatch, Step
from crosstrain.utils.units import finite

_SHOWN = 3  # maximum number of suspects in a log line
_RECORDED = 100  # maximum number of suspects in bad_steps.jsonl
_NARROWED = 64  # maximum number of samples that are evaluated one by one

# A micro batch or a sample that may have caused a bad step: its sample numbers (positions in the training order), and
# its mean loss per target.
Suspect = tuple[tuple[int, ...], float]


class RollBack(TrainingError):
    """A request to reload the last checkpoint. `left_out(checkpoint, state)` returns the samples to leave out."""

    def __init__(self, message: str, left_out: Callable[[Path, State], Ranges]) -> None:
        super().__init__(message)
        self.left_out = left_out


class BadSteps(Callback):
    """Applies the policy of `run.on_bad_step`. All ranks reach the same decision.

    Rank 0 appends one JSON object per bad step to the run's `bad_steps.jsonl`.
    """

    _problem: str | None = None  # problem of the current step
    _went_back: tuple[Path | None, int] = (None, 0)

    def __init__(self, options: Any, trainer: Any) -> None:
        super().__init__(options, trainer)
        self.runner, self.policy = self.trainer.runner, self.trainer.run.on_bad_step

    def after_backward(self, batch: Step, loss: float) -> str | None:
        self._batch, self._loss = batch, loss
        self._problem = self.check_loss(loss, self.trainer.state)
        return self._problem

    def after_step(self, metrics: StepMetrics) -> None:
        """Record an attempted step in the state, and handle a bad step. Collective if the step was bad.

        Raises RollBack if the policy is roll_back, and TrainingError if training must end.
        """
        state: State = self.trainer.state
        if metrics.applied:
            state.overflows_in_a_row = state.bad_in_a_row = 0
            if self.policy.spike is not None:
                state.recent_losses = [*state.recent_losses, self._loss][-self.policy.spike_window :]
            return
        where = f"step {state.step} ({show(self._batch.numbers)})"
        if self._problem is None and self.runner.precision.overflows:
            state.overflows_in_a_row += 1
            _end_after(
                self.runner.precision.options.max_skipped,
                state.overflows_in_a_row,
                where,
                f"steps in a row overflowed although the loss scale fell to {self.runner.precision.scaler.scale:g}, so "
                f"the model itself is diverging; lower run.init_lr, use run.amp=bf16, or look at these samples",
            )
        else:
            self._bad_step(state, metrics, where)

    def check_loss(self, loss: float, state: State) -> str | None:
        """Return the reason to skip a step with this loss; None if the loss is good."""
        if not math.isfinite(loss):
            return "the loss is not finite"
        spike, window = self.policy.spike, state.recent_losses[-self.policy.spike_window :]
        if spike is None or len(window) < self.policy.spike_window:
            return None
        usual = statistics.median(window)
        problem = f"the loss, {loss:.4g}, is a spike above {usual:.4g}, the median of the last {len(window)}"
        return problem if loss > spike * usual else None

    def _bad_step(self, state: State, metrics: StepMetrics, where: str) -> None:
        batch, policy = self._batch, self.policy.policy
        found = [] if self._problem is None else self.suspects(batch)
        suspects = [self._describe(*suspect) for suspect in found[:_RECORDED]]
        problem = self._problem or "the gradients are not finite"
        sentence = f"{where}: {problem}{_tell(suspects, len(found))}"
        self._write(
            {
                "time": time.strftime(TIME_FORMAT),
                "step": state.step,
                "problem": problem,
                "policy": policy,
                "loss": metrics.loss,
                "grad_norm": metrics.grad_norm,
                "samples": leave_out([], batch.numbers),
                "suspects": suspects,
            }
        )
        if policy == "stop":
            raise TrainingError(
                f"{sentence}; the step was not applied, and the last checkpoint is intact: lower run.init_lr or "
                f"run.grad_norm_clip, fix the data, or set run.on_bad_step to skip or roll_back, and run the same "
                f"command again"
            )
        if policy == "roll_back":
            raise RollBack(sentence, partial(self.go_back, sentence, batch.numbers))
        self._warn(f"{sentence}; the step is skipped")
        state.bad_in_a_row += 1
        state.skipped = [*state.skipped, [state.step, batch.numbers[0], batch.numbers[-1]]]
        _end_after(
            self.policy.max_in_a_row,
            state.bad_in_a_row,
            sentence,
            "bad steps in a row were skipped (run.on_bad_step.max_in_a_row), so the data is not the only cause; lower "
            "run.init_lr and resume from the last checkpoint",
        )

    def go_back(self, problem: str, numbers: Sequence[int], to: Path, state: State) -> Ranges:
        """Return the samples to leave out after a rollback, as ranges of positions in the training order.

        Raises TrainingError after too many rollbacks to the same checkpoint.
        """
        count = self._went_back[1] + 1 if self._went_back[0] == to else 1
        self._went_back = to, count
        _end_after(
            self.policy.max_in_a_row,
            count,
            problem,
            f"bad steps came after {to} (run.on_bad_step.max_in_a_row), so the data is not the only cause; lower "
            f"run.init_lr, or remove that checkpoint to resume from an earlier one",
        )
        self._warn(f"{problem}; rolling back to {to} and skipping {show(numbers)} from there on")
        return leave_out(state.left_out, numbers)

    def _warn(self, sentence: str) -> None:
        if self.trainer.is_main:  # the warning is the same on all ranks
            log.warning("%s", sentence)

    def suspects(self, micro_batches: list[MicroBatch]) -> list[Suspect]:
        """Return suspects: samples or micro batches that may have caused a bad step. Collective.

        Returns the samples with a non-finite loss. If all losses are finite, returns all micro batches by descending
        loss.
        """
        mine = {
            micro_batch.numbers: float(loss) / max(micro_batch.num_targets, 1)
            for micro_batch, loss in zip(micro_batches, self.runner.micro_losses, strict=False)
        }
        found = {numbers: loss for held in self.trainer.ranks.all_gather(mine) for numbers, loss in held.items()}
        wrong = sorted(numbers for numbers, loss in found.items() if not math.isfinite(loss))
        if not wrong:
            return sorted(found.items(), key=lambda suspect: (-suspect[1], suspect[0]))
        return [sample for numbers in wrong for sample in self._narrowed(numbers, found[numbers], among=len(wrong))]

    def _narrowed(self, numbers: tuple[int, ...], loss: float, among: int) -> list[Suspect]:
        """Return the samples that make a micro batch's loss non-finite, or the micro batch if no sample does."""
        if len(numbers) == 1 or len(numbers) * among > _NARROWED or self.runner.objective.makes_samples:
            return [(numbers, loss)]
        alone = []
        with self.runner.evaluating():  # no dropout; all ranks evaluate the same sample
            for number in numbers:
                batch = one_sample(self.trainer.dataset, self.trainer.run.seed, number)
                own_loss = float(self.runner.evaluate(batch)) / max(self.runner.objective.num_targets(batch), 1)
                alone.append(((number,), own_loss))
        return [sample for sample in alone if not math.isfinite(sample[1])] or [(numbers, loss)]

    def _describe(self, numbers: tuple[int, ...], loss: float) -> dict[str, Any]:
        """Format a suspect for bad_steps.jsonl."""
        indices = [self.trainer.dataset.training_index(self.trainer.run.seed, number) for number in numbers]
        places = [self.trainer.dataset.location(index) for index in indices]
        return {"samples": list(numbers), "indices": indices, "loss": finite(loss), "whereabouts": places}

    def _write(self, row: dict[str, Any]) -> None:
        try:
            if self.trainer.is_main:
                append(self.trainer.folder.bad_steps, json.dumps(row) + "\n")
        except OSError as error:
            log.warning("%s cannot be written to (%s); training continues", error.filename, error.strerror)


def _tell(suspects: list[dict[str, Any]], count: int) -> str:
    """Describe the first suspects for the log. count: total number of suspects."""
    if not suspects:
        return ""
    named = ", ".join(map(_name, suspects[:_SHOWN]))
    if all(suspect["loss"] is not None for suspect in suspects):
        return f", the highest losses are those of {named}"
    return f", because of {named}" + (f" and {count - _SHOWN} more" if count > _SHOWN else "")


def _name(suspect: dict[str, Any]) -> str:
    """Describe a suspect, such as `sample 7 (index 211 of the data: document 40 of data/mine; loss 9.1)`."""
    indices = suspect["indices"]
    about = f"{'index' if len(indices) == 1 else 'indices'} {', '.join(map(str, indices))} of the data"
    if len(indices) == 1 and suspect["whereabouts"][0]:
        about += f": {suspect['whereabouts'][0]}"
    if suspect["loss"] is not None:
        about += f"; loss {suspect['loss']:.4g}"
    return f"{show(suspect['samples'])} ({about})"


def _end_after(limit: int, count: int, where: str, what: str) -> None:
    if count >= limit:
        raise TrainingError(f"{where}: {count} {what}")
