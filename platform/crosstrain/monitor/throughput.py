"""Speed, memory and utilization of training, measured between two logged steps."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from crosstrain.engine.runner import Runner
from crosstrain.monitor.hardware import memory_mb, peak_flops
from crosstrain.monitor.metrics import StepMetrics


class Throughput:
    """Measures throughput since the last logged step. Time spent in saves and validations is excluded."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.begin()

    def begin(self) -> None:
        """Begin a new interval."""
        self.steps, self.waited = 0, 0.0  # steps, and seconds that this rank waited for data
        self._counted, self._start = 0, time.perf_counter()

    @property
    def seconds(self) -> float:
        """Seconds of training since the interval began."""
        return time.perf_counter() - self._start

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the time of the block from the throughput."""
        started = time.perf_counter()
        yield
        self._start += time.perf_counter() - started

    def measure(self, metrics: StepMetrics, count: int, sequence_length: int | None) -> None:
        """Fill in speed, memory and utilization after a step.

        count: target tokens of the step, or its samples if the model does not predict tokens.
        """
        device, timers = self._runner.device, self._runner.timers.seconds
        self.steps += 1
        self._counted += count
        self.waited += timers.get("data loader", 0.0)
        seconds = self.seconds
        metrics.step_ms = 1000 * seconds / self.steps
        rate = self._counted / seconds
        if self._runner.model.predicts_tokens:
            metrics.tokens_per_second = rate
        else:
            metrics.samples_per_second = rate
        metrics.timers = {phase: 1000 * s for phase, s in timers.items()}
        metrics.timers["step"] = 1000 * self._runner.timers.since_reset  # this step only; `step_ms` is a mean
        metrics.memory = memory_mb(device)
        peak = peak_flops(device, self._runner.precision.dtype)
        if peak and (flops := self._runner.model.structure.flops_per_token(sequence_length)):
            metrics.mfu = (metrics.tokens_per_second or 0.0) * flops / (peak * self._runner.world.size)
