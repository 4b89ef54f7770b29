"""The report of a training's numbers: throughput, log lines in Megatron's notation, the progress bar, trackers."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from tqdm import tqdm

from crosstrain.checkpoint.run_folder import RunFolder
from crosstrain.config.load import Config
from crosstrain.engine.runner import Runner
from crosstrain.monitor.hardware import gpu_utilisation, memory_mb, peak_flops
from crosstrain.monitor.metrics import Row, StepMetrics
from crosstrain.monitor.stragglers import StragglerDetector
from crosstrain.monitor.tracker import TrackedRun, Trackers
from crosstrain.utils.logging import log
from crosstrain.utils.units import disjoint


class Reporter:
    """Measures throughput between logged steps and reports it; on ranks other than 0 it only measures."""

    def __init__(
        self, runner: Runner, config: Config, folder: RunFolder, resumed_step: int, max_iters: int, global_batch: int
    ) -> None:
        self._runner, self._config, self._folder = runner, config, folder
        self._max_iters, self._global_batch, self._is_main = max_iters, global_batch, runner.world.rank == 0
        self._begin(resumed_step)

    def _begin(self, step: int) -> None:
        self.tracked_step = step
        self.trackers = self._start_trackers()
        self._bar = tqdm(
            total=self._max_iters, initial=step, unit="step", dynamic_ncols=True,
            disable=not (self._is_main and sys.stderr.isatty()),
        )  # fmt: skip
        self._memory_logged = self._spoke = False
        self._stragglers = StragglerDetector(self._runner, self._config.run.num_workers)
        self.begin_interval()

    def begin_interval(self) -> None:
        self._steps, self._counted, self._waited, self._start = 0, 0, 0.0, time.perf_counter()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the time inside out of the throughput, which is training's alone."""
        started = time.perf_counter()
        yield
        self._start += time.perf_counter() - started

    def measure(self, metrics: StepMetrics, count: int, sequence_length: int | None) -> None:
        """Fill in speed, memory and utilisation of a step of `count` target tokens, or samples of other models."""
        device, timers = self._runner.device, self._runner.timers.seconds
        self._steps += 1
        self._counted += count
        self._waited += timers.get("data loader", 0.0)
        seconds = time.perf_counter() - self._start
        metrics.step_ms = 1000 * seconds / self._steps
        rate = self._counted / seconds
        if self._runner.model.predicts_tokens:
            metrics.tokens_per_second = rate
        else:
            metrics.samples_per_second = rate
        metrics.timers = {phase: 1000 * s for phase, s in timers.items()}
        metrics.timers["step"] = 1000 * self._runner.timers.since_reset  # `step_ms` is of steps not logged, too
        metrics.memory = memory_mb(device)
        peak = peak_flops(device, self._runner.precision.dtype)
        if peak and (flops := self._runner.model.flops_per_token(sequence_length)):
            metrics.mfu = (metrics.tokens_per_second or 0.0) * flops / (peak * self._runner.world.size)

    def advance(self, metrics: StepMetrics) -> None:
        """Move the progress bar by a step."""
        self._bar.set_postfix_str(f"loss {_number(metrics.loss, '.4f')}, {metrics.throughput}", refresh=False)
        self._bar.update()
        interval = self._config.run.log_interval
        if not self._spoke and self._bar.disable and metrics.step % interval and metrics.step_ms:
            seconds = metrics.step_ms / 1000
            log.info("step %d took %.1f s; the log has a line every %d steps", metrics.step, seconds, interval)
        self._spoke = True

    def log(self, metrics: StepMetrics) -> Row:
        """Log a step, and after the first one the memory in use; a new interval begins. Collective.

        Returns the row for trackers, with what only logged steps measure.
        """
        seconds = time.perf_counter() - self._start
        waited, metrics.notes = self._stragglers.check(metrics.step, self._steps, seconds, self._waited)
        metrics.gpu_utilisation = gpu_utilisation(self._runner.device)
        metrics.recorded = disjoint(self._runner.means(self._runner.model.take_recorded()), metrics.recorded)
        if waited > 0:
            metrics.loader_samples_per_second = self._global_batch * self._steps / waited
        for line in log_lines(metrics, self._max_iters, self._runner.model.targets):
            log.info(line)
        if not self._memory_logged:
            memory = (f"{name[len('memory_') : -len('_mb')]}: {mib:.1f}" for name, mib in metrics.memory.items())
            log.info("memory (MB) | %s", " | ".join(memory))
            self._memory_logged = True
        if self._is_main:
            for note in metrics.notes:
                log.warning(note)
        self.begin_interval()
        return metrics.row()

    def go_back(self, step: int) -> None:
        """Begin anew after step `step`, to which the run went back."""
        self.close()
        self._begin(step)

    def _start_trackers(self) -> Trackers:
        run = TrackedRun(self._folder.path, self._config.plain, self.tracked_step)
        return Trackers(self._config.run.trackers if self._is_main else [], run)

    def restart_trackers(self) -> None:
        """Start the trackers anew, in a folder that was made again or moved."""
        self.trackers.close(finished=False)
        self.trackers = self._start_trackers()

    def track(self, row: Row) -> None:
        self.tracked_step = row["step"]
        self.trackers.log(row)

    def close(self, ended: bool = False) -> None:
        """Close bar and trackers; `ended`: training has ended before its last step as it should."""
        self._bar.close()
        self.trackers.close(finished=ended or self.tracked_step == self._max_iters)


def log_lines(metrics: StepMetrics, max_iters: int, targets: str = "tokens") -> list[str]:
    """Return the two lines of a logged step, in the order and notation of Megatron's log."""
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
