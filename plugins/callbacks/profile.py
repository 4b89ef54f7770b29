"""torch's profiler over a window of steps: a trace for viewers, and a table of operators."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from crosstrain import Callback, StepMetrics, log, registry


@registry.register_callback("profile")
class Profile(Callback):
    """Profiles the steps of `run.profile`, from data loading to the update; every run has this hook.

    A run that resumes inside the window profiles the rest of it. The window is profiled only once, even if its steps
    are repeated after a rollback.
    """

    def __init__(self, options: Any, trainer: Any) -> None:
        super().__init__(options, trainer)
        self._asked, self._rank, self._device = trainer.run.profile, trainer.runner.world.rank, trainer.runner.device
        profiled = self._asked is not None and self._rank in self._asked.ranks
        self._window = self._asked.steps if profiled else (0, 0)  # first and last step; (0, 0): no steps
        self._running: profile | None = None
        self._first = self._last = 0  # first and last profiled step
        self._step = ExitStack()  # holds the record of the current step

    def before_batch(self) -> None:
        number = self.trainer.state.step + 1
        if not self._window[0] <= number <= self._window[1]:
            self.before_end()  # a rollback may have moved training out of the window
        else:
            if self._running is None:
                self._start(number)
            self._step.enter_context(record_function(f"ProfilerStep#{number}"))  # viewers identify steps by this name

    def after_step(self, metrics: StepMetrics) -> None:
        self._step.close()
        self._last = metrics.step
        if metrics.step == self._window[1]:
            with self.trainer.throughput.paused():
                self.before_end()

    def _start(self, number: int) -> None:
        self._first = number
        cuda = [ProfilerActivity.CUDA] if self._device.type == "cuda" else []
        self._running = profile(
            activities=[ProfilerActivity.CPU, *cuda],
            record_shapes=self._asked.record_shapes,
            with_stack=self._asked.with_stack,
            profile_memory=self._asked.profile_memory,
        )
        self._running.start()

    def before_end(self) -> None:
        """Stop the running profile, if any, and write it to files. Logs a warning if writing fails."""
        if self._running is None:
            return
        done, self._running = self._running, None
        self._window = (0, 0)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # otherwise kernels that are still running would be missing
        log.info("writing a profile; training continues afterwards")
        done.stop()
        folder = self.trainer.folder.profile / f"steps_{self._first:06d}-{self._last:06d}"
        steps = f"step {self._first}" if self._first == self._last else f"steps {self._first} to {self._last}"
        try:
            self._write(done, folder, steps)
        except (OSError, RuntimeError, ValueError) as error:  # torch may write no trace, or an incomplete trace
            log.warning("%s: the profile could not be written (%s); training continues", folder, error)
        else:
            log.info("wrote the profile of %s to %s", steps, folder)

    def _write(self, done: profile, folder: Path, steps: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        start = folder / f"rank{self._rank}"
        done.export_chrome_trace(f"{start}.pt.trace.json")  # TensorBoard's plugin looks for this suffix
        averages = done.key_averages(group_by_input_shape=self._asked.record_shapes)
        text = f"Rank {self._rank}, {steps}. Times are sums over these steps.\n"
        orders = ["time_total", "memory_usage"] if self._asked.profile_memory else ["time_total"]
        for order in (f"self_{self._device.type}_{measure}" for measure in orders):
            text += f"\nBy {order}:\n{averages.table(sort_by=order, row_limit=self._asked.top)}\n"
        start.with_suffix(".operators.txt").write_text(text, encoding="utf-8")
