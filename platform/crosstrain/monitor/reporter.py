"""The report of a training's numbers: throughput per interval, log lines, the progress bar, the trackers."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from crosstrain.checkpoint.run_folder import RunFolder
from crosstrain.config.load import Config
from crosstrain.engine.runner import Runner
from crosstrain.monitor.hardware import gpu_utilisation, memory_mb, peak_flops
from crosstrain.monitor.metrics import Row, StepMetrics
from crosstrain.monitor.progress import Progress, log_line, memory_line
from crosstrain.monitor.stragglers import StragglerDetector
from crosstrain.monitor.tracker import TrackedRun, Trackers
from crosstrain.utils.logging import log


class Reporter:
    """Measures throughput between logged steps and reports it; on ranks other than 0 it only measures."""

    def __init__(
        self, runner: Runner, config: Config, folder: RunFolder, resumed_step: int, max_iters: int, global_batch: int
    ) -> None:
        is_main = runner.world.rank == 0
        self._runner, self._max_iters, self._global_batch = runner, max_iters, global_batch
        self._components, self._config, self._folder = config.run.trackers if is_main else [], config.plain, folder
        self._num_workers, self._is_main = config.run.num_workers, is_main
        self._begin(resumed_step)

    def _begin(self, step: int) -> None:
        self._tracked_step = step
        self.trackers = self._start_trackers()
        self._progress = Progress(self._max_iters, step, enabled=self._is_main)
        self._memory_logged = False
        self._stragglers = StragglerDetector(self._runner, self._num_workers)
        self.begin_interval()

    def begin_interval(self) -> None:
        self._steps, self._tokens, self._start = 0, 0, time.perf_counter()
        self._stragglers.begin_interval()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the time inside out of the throughput, which is training's alone."""
        started = time.perf_counter()
        yield
        self._start += time.perf_counter() - started

    def measure(self, metrics: StepMetrics, tokens: int, sequence_length: int | None) -> None:
        """Count a step of `tokens` target tokens, and fill in its speed, memory and utilisation."""
        self._steps += 1
        self._tokens += tokens
        self._stragglers.add_step()
        seconds = time.perf_counter() - self._start
        device, precision = self._runner.device, self._runner.precision
        metrics.step_ms = 1000 * seconds / self._steps
        metrics.tokens_per_second = self._tokens / seconds
        metrics.timers = {phase: 1000 * s for phase, s in self._runner.timers.seconds.items()}
        metrics.memory = memory_mb(device)
        peak, flops = peak_flops(device, precision.dtype), self._runner.model.flops_per_token(sequence_length)
        if peak and flops:
            metrics.mfu = metrics.tokens_per_second * flops / (peak * self._runner.world.size)

    def advance(self, metrics: StepMetrics) -> None:
        """Move the progress bar by a step."""
        self._progress.advance(metrics)

    def log(self, metrics: StepMetrics) -> None:
        """Log a step, and after the first one the memory in use; a new interval begins. Collective.

        Fills in what only logged steps measure.
        """
        waited, metrics.notes = self._stragglers.check(metrics.step, self._steps, time.perf_counter() - self._start)
        metrics.gpu_utilisation = gpu_utilisation(self._runner.device).get("gpu_utilisation")
        if waited > 0:
            metrics.loader_samples_per_second = self._global_batch * self._steps / waited
        for line in log_line(metrics, self._max_iters):
            log.info(line)
        if not self._memory_logged:
            log.info(memory_line(metrics))
            self._memory_logged = True
        if self._runner.world.rank == 0:
            for note in metrics.notes:
                log.warning(note)
        self.begin_interval()

    def go_back(self, step: int) -> None:
        """Begin anew after step `step`, to which the run went back."""
        self.close()
        self._begin(step)

    def _start_trackers(self) -> Trackers:
        return Trackers(self._components, TrackedRun(self._folder.path, self._config, self._tracked_step))

    def restart_trackers(self) -> None:
        """Start the trackers anew, in a folder that was made again or moved."""
        self.trackers.close(finished=False)
        self.trackers = self._start_trackers()

    def track(self, row: Row) -> None:
        self._tracked_step = row["step"]
        self.trackers.log(row)

    def close(self) -> None:
        self._progress.close()
        self.trackers.close(finished=self._tracked_step == self._max_iters)
