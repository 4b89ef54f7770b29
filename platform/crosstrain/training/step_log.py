"""The hook that logs steps: log lines, notes on slow ranks, and the progress bar."""

import sys
from typing import Any

from tqdm import tqdm

from crosstrain.engine.runner import recorded_means
from crosstrain.monitor.hardware import gpu_utilisation
from crosstrain.monitor.metrics import StepMetrics
from crosstrain.monitor.stragglers import StragglerDetector
from crosstrain.training.callback import Callback
from crosstrain.training.log_lines import log_lines, shown
from crosstrain.utils.logging import log
from crosstrain.utils.units import disjoint


class StepLog(Callback):
    """Logs every `run.log_interval`-th step and the last step, and adds their metrics to `trainer.row`."""

    def __init__(self, options: Any, trainer: Any) -> None:
        super().__init__(options, trainer)
        self._bar: tqdm | None = None
        self._stragglers = StragglerDetector(trainer.runner, trainer.run.num_workers)
        self._is_first, self._spoke = True, False
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
        self._bar.set_postfix_str(f"loss {shown(metrics.loss, '.4f')}, {metrics.throughput}", refresh=False)
        self._bar.update()
        interval = self.trainer.run.log_interval
        if not self._spoke and self._bar.disable and metrics.step % interval and metrics.step_ms:
            seconds = metrics.step_ms / 1000
            log.info("step %d took %.1f s; the log has a line every %d steps", metrics.step, seconds, interval)
        self._spoke = True

    def _log(self, metrics: StepMetrics) -> None:
        """Log a step and begin a new interval. Collective."""
        trainer, clock = self.trainer, self.trainer.throughput
        runner, ranks = trainer.runner, trainer.ranks
        waited, metrics.notes = self._stragglers.check(ranks, metrics.step, clock.steps, clock.seconds, clock.waited)
        metrics.gpu_utilisation = gpu_utilisation(runner.device)
        metrics.recorded = disjoint(recorded_means(runner.model.take_recorded(), ranks), trainer.hooks.scalars())
        if waited > 0:
            metrics.loader_samples_per_second = trainer.plan.global_batch * clock.steps / waited
        for line in log_lines(metrics, trainer.max_iters, trainer.run.log, runner.objective.targets, self._is_first):
            log.info(line)
        self._is_first = False
        if trainer.is_main:
            for note in metrics.notes:
                log.warning(note)
        trainer.row |= metrics.row()
        self._last = None
        clock.begin()
