"""torch's profiler over a window of steps: a trace for viewers, and a table of operators."""

from contextlib import ExitStack
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from crosstrain.config.run_options import ProfileOptions
from crosstrain.utils.logging import log


class Profiler:
    """Profiles this rank in the window of `options`, and writes it into a folder below `folder`.

    Does nothing without options, or if they do not include this rank. A run that resumes inside the window profiles the
    rest of it. The window is profiled only once, even if its steps are repeated after a rollback.
    """

    def __init__(self, options: ProfileOptions | None, folder: Path, rank: int, device: torch.device) -> None:
        self.options, self.folder, self.rank, self.device = options, folder, rank, device
        self._window = options.steps if options is not None and rank in options.ranks else (0, 0)  # (0, 0): none
        self._running: profile | None = None
        self._seen = (0, 0)  # first and last profiled step
        self._step = ExitStack()  # holds the record of the current step

    def begin(self, number: int) -> None:
        """Call this when attempted step `number` begins. The step is profiled if it is in the window."""
        self._step.close()  # `end` is not called for a step that is rolled back
        if not self._window[0] <= number <= self._window[1]:
            self.write()  # if a rollback left the window
            return
        if self._running is None:
            self._start(number)
        self._step.enter_context(record_function(f"ProfilerStep#{number}"))  # viewers identify steps by this name

    def end(self, number: int) -> None:
        """Call this when step `number` has ended. After the last step of the window, the profile is written."""
        if self._running is None:
            return
        self._step.close()
        self._seen = (self._seen[0], number)
        if number == self._window[1]:
            self.write()

    def _start(self, number: int) -> None:
        assert self.options is not None
        self._seen = (number, number)
        cuda = [ProfilerActivity.CUDA] if self.device.type == "cuda" else []
        self._running = profile(
            activities=[ProfilerActivity.CPU, *cuda],
            record_shapes=self.options.record_shapes,
            with_stack=self.options.with_stack,
            profile_memory=self.options.profile_memory,
        )
        self._running.start()

    def write(self) -> None:
        """Stop the running profile and write it. Logs a warning if that fails."""
        if self._running is None:
            return
        self._step.close()
        done, self._running = self._running, None
        self._window = (0, 0)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # otherwise kernels that are still running would be missing
        log.info("writing a profile; training goes on after it")
        done.stop()
        first, last = self._seen
        folder = self.folder / f"steps_{first:06d}-{last:06d}"
        steps = f"step {first}" if first == last else f"steps {first} to {last}"
        try:
            self._write(done, folder, f"rank {self.rank}, {steps}")
        except (OSError, RuntimeError, ValueError) as error:  # torch may write no trace, or only a part of it
            log.warning("%s: the profile could not be written (%s); training goes on", folder, error)
        else:
            log.info("profile of %s in %s", steps, folder)

    def _write(self, done: profile, folder: Path, title: str) -> None:
        assert self.options is not None
        folder.mkdir(parents=True, exist_ok=True)
        start = folder / f"rank{self.rank}"
        done.export_chrome_trace(f"{start}.pt.trace.json")  # TensorBoard's plugin looks for this suffix
        averages = done.key_averages(group_by_input_shape=self.options.record_shapes)
        place = "cuda" if self.device.type == "cuda" else "cpu"
        text = f"{title[0].upper()}{title[1:]}. Times are sums over these steps.\n"
        for order in [f"self_{place}_time_total"] + [f"self_{place}_memory_usage"] * self.options.profile_memory:
            text += f"\nBy {order}:\n{averages.table(sort_by=order, row_limit=self.options.top)}\n"
        start.with_suffix(".operators.txt").write_text(text, encoding="utf-8")
