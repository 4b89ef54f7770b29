"""The hook that logs steps: log lines, notes of other hooks, and the progress bar."""

import sys

from tqdm import tqdm

from crosstrain.engine.runner import recorded_means
from crosstrain.monitor.hardware import gpu_utilisation
from crosstrain.monitor.metrics import StepMetrics
from crosstrain.training.callback import Callback
from crosstrain.training.log_lines import log_lines, shown
from crosstrain.utils.logging import log
from crosstrain.utils.units import disjoint


class StepLog(Callback):
    """Logs every `run.log_interval`-th step and the last step, and adds their metrics to `trainer.row`."""

    _bar = tqdm(disable=True)  # replaced in `on_start`
    _is_first = True
    _last: StepMetrics | None = None  # metrics of the last step; None: already logged

    def on_start(self) -> None:
        self.close()
        hidden = not (self.trainer.is_main and sys.stderr.isatty())
        step, last = self.trainer.state.step, self.trainer.max_iters
        self._bar = tqdm(total=last, initial=step, unit="step", dynamic_ncols=True, disable=hidden)
        self.trainer.throughput.begin()

    def after_step(self, metrics: StepMetrics) -> None:
        self._bar.set_postfix_str(f"loss {shown(metrics.loss, '.4f')}, {metrics.throughput}", refresh=False)
        self._bar.update()
        self._last = metrics
        if self.trainer.logs(metrics.step):
            self._log(metrics)

    def before_end(self) -> None:
        if self._last is not None and not self.trainer.stopped:  # a callback ended the run between logged steps
            self._log(self._last)

    def close(self) -> None:
        self._bar.close()

    def _log(self, metrics: StepMetrics) -> None:
        """Log a step and begin a new interval. Collective."""
        trainer, runner = self.trainer, self.trainer.runner
        metrics.gpu_utilisation = gpu_utilisation(runner.device)
        metrics.recorded = disjoint(
            recorded_means(runner.model.take_recorded(), trainer.ranks), trainer.hooks.scalars()
        )
        for line in log_lines(metrics, trainer.max_iters, trainer.run.log, runner.objective.targets, self._is_first):
            log.info(line)
        self._is_first = False
        if trainer.is_main:
            for note in metrics.notes:
                log.warning(note)
        trainer.row |= metrics.row()
        self._last = None
        trainer.throughput.begin()
