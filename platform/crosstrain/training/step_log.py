"""The hook that logs steps: lines in Megatron's format, notes on slow ranks, the progress bar."""

from __future__ import annotations

import sys
from typing import Any

from tqdm import tqdm

from crosstrain.engine.runner import recorded_means
from crosstrain.monitor.hardware import gpu_utilisation
from crosstrain.monitor.metrics import StepMetrics
from crosstrain.monitor.stragglers import StragglerDetector
from crosstrain.training.callback import Callback
from crosstrain.utils.logging import log
from crosstrain.utils.units import disjoint


class StepLog(Callback):
    """Logs every `run.log_interval`-th step and the last step, and adds their numbers to `trainer.row`."""

    def __init__(self, options: Any, trainer: Any) -> None:
        super().__init__(options, trainer)
        self._bar: tqdm | None = None
        self._stragglers = StragglerDetector(trainer.runner, trainer.run.num_workers)
        self._memory_logged = self._spoke = False
        self._last: StepMetrics | None = None  # metrics of the last step; None: already logged

    def on_start(self) -> None:
        self.close()
        self._bar = self._new_bar()
        self._stragglers = StragglerDetector(self.trainer.runner, self.trainer.run.num_workers)
        self.trainer.throughput.begin()

    def after_step(self, metrics: StepMetrics) -> None:
        self._advance(metrics)
        self._last = metrics
        if self.trainer.logs(metrics.step):
            self._log(metrics)

    def before_end(self) -> None:
        if self._last is not None and not self.trainer.stopped:  # a callback ended the run between logged steps
            self._log(self._last)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()

    def _new_bar(self) -> tqdm:
        hidden = not (self.trainer.is_main and sys.stderr.isatty())
        step, last = self.trainer.state.step, self.trainer.max_iters
        return tqdm(total=last, initial=step, unit="step", dynamic_ncols=True, disable=hidden)

    def _advance(self, metrics: StepMetrics) -> None:
        """Move the progress bar by a step."""
        if self._bar is None:  # a single step, without `fit`
            self._bar = self._new_bar()
        self._bar.set_postfix_str(f"loss {_number(metrics.loss, '.4f')}, {metrics.throughput}", refresh=False)
        self._bar.update()
        interval = self.trainer.run.log_interval
        if not self._spoke and self._bar.disable and metrics.step % interval and metrics.step_ms:
            seconds = metrics.step_ms / 1000
            log.info("step %d took %.1f s; the log has a line every %d steps", metrics.step, seconds, interval)
        self._spoke = True

    def _log(self, metrics: StepMetrics) -> None:
        """Log a step, and once the memory in use; start a new interval. Collective."""
        trainer, clock = self.trainer, self.trainer.throughput
        runner, ranks = trainer.runner, trainer.ranks
        waited, metrics.notes = self._stragglers.check(ranks, metrics.step, clock.steps, clock.seconds, clock.waited)
        metrics.gpu_utilisation = gpu_utilisation(runner.device)
        metrics.recorded = disjoint(recorded_means(runner.model.take_recorded(), ranks), trainer.hooks.scalars())
        if waited > 0:
            metrics.loader_samples_per_second = trainer.plan.global_batch * clock.steps / waited
        for line in log_lines(metrics, trainer.max_iters, runner.objective.targets):
            log.info(line)
        if not self._memory_logged:
            memory = (f"{name[len('memory_') : -len('_mb')]}: {mib:.1f}" for name, mib in metrics.memory.items())
            log.info("memory (MB) | %s", " | ".join(memory))
            self._memory_logged = True
        if trainer.is_main:
            for note in metrics.notes:
                log.warning(note)
        trainer.row |= metrics.row()
        self._last = None
        clock.begin()


def log_lines(metrics: StepMetrics, max_iters: int, targets: str = "tokens") -> list[str]:
    """Return the two lines of a logged step, in the order and format of Megatron's log."""
    first = [
        f"iteration {metrics.step:8d}/{max_iters:8d}",
        f"elapsed time per iteration (ms): {metrics.step_ms:.1f}",
        f"learning rate {metrics.lr:.3E}",
        f"{'lm loss' if targets == 'tokens' else 'loss'} {_number(metrics.loss, '.6E')}",
        f"loss scale {metrics.loss_scale:.1f}",
        f"grad norm {_number(metrics.grad_norm, '.3f')}",
        metrics.throughput,
    ]
    first += [f"{name} {value:.6g}" for name, value in metrics.recorded.items()]
    if metrics.skipped_steps:
        first.append(f"skipped steps {metrics.skipped_steps}")
    if metrics.mfu is not None:
        first.append(f"MFU {100 * metrics.mfu:.1f}%")
    timers = [f"{phase}: {milliseconds:.2f}" for phase, milliseconds in metrics.timers.items()]
    return [" | ".join(first), "time (ms) | " + " | ".join(timers)]


def _number(value: float | None, form: str) -> str:
    return "overflow" if value is None else format(value, form)
