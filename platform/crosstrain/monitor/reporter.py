"""A run's numbers on their way to people: the interval's clock, log lines, the progress bar, the trackers."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from crosstrain.checkpoint.run_folder import RunFolder
from crosstrain.config.load import Config
from crosstrain.engine.runner import Runner
from crosstrain.monitor.hardware import gpu_utilisation, memory_mb, peak_flops
from crosstrain.monitor.metrics import Row
from crosstrain.monitor.progress import Progress, log_line, memory_line
from crosstrain.monitor.stragglers import RankWatch
from crosstrain.monitor.tracker import TrackedRun
from crosstrain.monitor.trackers import Trackers
from crosstrain.utils.logging import log


class Reporter:
    """Measures throughput between logged steps and reports them; on ranks but the first it only measures."""

    def __init__(
        self, runner: Runner, config: Config, folder: RunFolder, resumed_step: int, max_iters: int, global_batch: int
    ) -> None:
        is_main = runner.world.rank == 0
        self._runner, self._max_iters = runner, max_iters
        self._components, self._config, self._folder = config.run.trackers if is_main else [], config.plain, folder
        self._tracked_step = resumed_step
        self.trackers = self._start_trackers()
        self._progress = Progress(max_iters, resumed_step, enabled=is_main)
        self._memory_logged = False
        self._batch = global_batch
        self._watch = RankWatch(runner, config.run.num_workers)
        self.begin_interval()

    def begin_interval(self) -> None:
        self._steps, self._tokens, self._start = 0, 0, time.perf_counter()
        self._watch.begin_interval()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Time spent inside does not count: throughput is training's alone."""
        started = time.perf_counter()
        yield
        self._start += time.perf_counter() - started

    def measure(self, tokens: int, sequence_length: int | None) -> Row:
        """Count a step of `tokens` target tokens; time per step, tokens/s, memory and utilisation so far."""
        self._steps += 1
        self._tokens += tokens
        self._watch.count()
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
        """Log a step, and after the first one the memory in use; a new interval begins. Collective.

        The row gets what is measured in logged steps alone.
        """
        waited, notes = self._watch.judge(row["step"], self._steps, time.perf_counter() - self._start)
        row |= gpu_utilisation(self._runner.device)
        if waited > 0:
            row["loader_samples_per_second"] = self._batch * self._steps / waited
        for line in log_line(row, self._max_iters):
            log.info(line)
        if not self._memory_logged:
            log.info(memory_line(row))
            self._memory_logged = True
        if notes:
            row["notes"] = notes
            if self._runner.world.rank == 0:
                for note in notes:
                    log.warning(note)
        self.begin_interval()

    def _start_trackers(self) -> Trackers:
        return Trackers(self._components, TrackedRun(self._folder.path, self._config, self._tracked_step))

    def restart_trackers(self) -> None:
        """Have trackers go on in a folder that was made again or moved."""
        self.trackers.close(finished=False)
        self.trackers = self._start_trackers()

    def track(self, row: dict[str, Any]) -> None:
        self._tracked_step = row["step"]
        self.trackers.log(row)

    def close(self) -> None:
        self._progress.close()
        self.trackers.close(finished=self._tracked_step == self._max_iters)
