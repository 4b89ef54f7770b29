"""The report of a training's numbers: throughput per interval, log lines, the progress bar, the trackers."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from crosstrain.checkpoint.run_folder import RunFolder
from crosstrain.config.load import Config
from crosstrain.engine.runner import Runner
from crosstrain.monitor.hardware import gpu_utilisation, memory_mb, peak_flops
from crosstrain.monitor.metrics import Row
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
        self._tracked_step = resumed_step
        self.trackers = self._start_trackers()
        self._progress = Progress(max_iters, resumed_step, enabled=is_main)
        self._memory_logged = False
        self._stragglers = StragglerDetector(runner, config.run.num_workers)
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

    def measure(self, tokens: int, sequence_length: int | None) -> Row:
        """Count a step of `tokens` target tokens; returns time per step, tokens/s, memory and utilisation so far."""
        self._steps += 1
        self._tokens += tokens
        self._stragglers.add_step()
        seconds = time.perf_counter() - self._start
        device, precision = self._runner.device, self._runner.precision
        row: Row = {
            "step_ms": 1000 * seconds / self._steps,
            "tokens_per_second": self._tokens / seconds,
            "timers": {phase: 1000 * s for phase, s in self._runner.timers.seconds.items()},
            **memory_mb(device),
        }
        peak, flops = peak_flops(device, precision.dtype), self._runner.model.flops_per_token(sequence_length)
        if peak and flops:
            row["mfu"] = row["tokens_per_second"] * flops / (peak * self._runner.world.size)
        return row

    def advance(self, row: Row) -> None:
        """Move the progress bar by a step."""
        self._progress.advance(row)

    def log(self, row: Row) -> None:
        """Log a step, and after the first one the memory in use; begin a new interval. Collective.

        Adds to the row what is measured in logged steps alone.
        """
        waited, notes = self._stragglers.check(row["step"], self._steps, time.perf_counter() - self._start)
        row |= gpu_utilisation(self._runner.device)
        if waited > 0:
            row["loader_samples_per_second"] = self._global_batch * self._steps / waited
        for line in log_line(row, self._max_iters):
            log.info(line)
        if not self._memory_logged:
            log.info(memory_line(row))
            self._memory_logged = True
        if notes:
            row["notes"] = notes
            for note in notes if self._runner.world.rank == 0 else []:
                log.warning(note)
        self.begin_interval()

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
