"""torch's profiler over windows of steps: a trace for viewers, a table of operators, memory over time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from crosstrain.config.run_options import ProfileOptions
from crosstrain.monitor.memory_timeline import read_memory, write_memory
from crosstrain.utils.errors import UserError
from crosstrain.utils.logging import log


class Profiler:
    """Profiles this rank in the windows that `options` name, and writes one folder for each under `folder`.

    Does nothing where `options` is None or this rank is not among theirs. Of a window that a run was resumed in, what
    is left is profiled; one whose steps are made again, after a roll back, is profiled once.
    """

    def __init__(self, options: ProfileOptions | None, folder: Path, rank: int, device: torch.device) -> None:
        self.options, self.folder, self.rank, self.device = options, folder, rank, device
        self._windows = options.windows if options is not None and rank in options.ranks else []
        self._running: profile | None = None
        self._window: tuple[int, ...] = (0, 0)  # that is being profiled
        self._seen = (0, 0)  # first and last step of it that were

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Around an attempted step, whose number is `number`."""
        if not self._windows:
            yield
            return
        window = next((w for w in self._windows if w[0] <= number <= w[1]), None)
        if self._running is not None and window != self._window:  # a roll back led out of it
            self.write()
        if window is None:
            yield
            return
        if self._running is None:
            self._begin(window, number)
        with record_function(f"ProfilerStep#{number}"):  # the name that viewers know steps by
            yield
        self._seen = (self._seen[0], number)

    def ends_at(self, number: int) -> bool:
        """Whether step `number` was the last one of a window, so that it is time to write."""
        return self._running is not None and number == self._window[1]

    def _begin(self, window: tuple[int, ...], number: int) -> None:
        assert self.options is not None
        self._window, self._seen = window, (number, number)
        cuda = [ProfilerActivity.CUDA] if self.device.type == "cuda" else []
        self._running = profile(
            activities=[ProfilerActivity.CPU, *cuda], record_shapes=self.options.record_shapes,
            with_stack=self.options.with_stack, profile_memory=self.options.profile_memory,
        )  # fmt: skip
        self._running.start()

    def write(self) -> None:
        """End the profile that is running, if one is, and write it; a warning where that fails."""
        if self._running is None:
            return
        done, self._running = self._running, None
        self._windows = [window for window in self._windows if window != self._window]
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # or kernels that are still under way would be missing
        done.stop()
        folder = self.folder / f"steps_{self._seen[0]:06d}-{self._seen[1]:06d}"
        try:
            self._write(done, folder)
        except (OSError, RuntimeError, ValueError) as error:  # torch writes the trace, or only a part of it
            log.warning("%s: the profile could not be written (%s); training goes on", folder, error)
        else:
            log.info("profile of %s in %s", self._steps(), folder)

    def _write(self, done: profile, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        start = folder / f"rank{self.rank}"
        trace = start.with_suffix(".pt.trace.json")  # the ending that TensorBoard's plugin looks for
        done.export_chrome_trace(str(trace))
        start.with_suffix(".operators.txt").write_text(self._tables(done), encoding="utf-8")
        if self.options is not None and self.options.profile_memory:
            title = f"rank {self.rank}, {self._steps()}"
            try:
                write_memory(read_memory(trace), start.with_suffix(".memory.json"), title)
            except UserError as error:  # matplotlib is missing; the picture is no reason to end the training
                log.warning("%s", error)

    def _tables(self, done: profile) -> str:
        """The operators that took the most time, and those that allocated the most."""
        assert self.options is not None
        averages = done.key_averages(group_by_input_shape=self.options.record_shapes)
        place = "cuda" if self.device.type == "cuda" else "cpu"
        orders = [f"self_{place}_time_total"] + [f"self_{place}_memory_usage"] * self.options.profile_memory
        parts = [f"Rank {self.rank}, {self._steps()}. Times are sums over these steps."]
        for order in orders:
            parts += [f"\nBy {order}:", averages.table(sort_by=order, row_limit=self.options.top)]
        return "\n".join(parts) + "\n"

    def _steps(self) -> str:
        first, last = self._seen
        return f"step {first}" if first == last else f"steps {first} to {last}"
