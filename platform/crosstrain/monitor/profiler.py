"""torch's profiler over windows of steps: a trace for viewers, a table of operators, memory over time."""

import json
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from crosstrain.config.run_options import ProfileOptions
from crosstrain.utils.drawing import downsample, picture
from crosstrain.utils.errors import UserError
from crosstrain.utils.files import write_json
from crosstrain.utils.logging import log

_MIB = 1 << 20
_DEVICES = {0: "CPU", 1: "GPU"}  # c10::DeviceType, as traces have it
_BUCKETS = 2000  # of a curve, each with its lowest and its highest point; more are no wider than the picture


class Profiler:
    """Profiles this rank in the windows of `options`, and writes a folder below `folder` for each.

    Does nothing without options, or for a rank that they do not name. A run that resumes inside a window profiles the
    rest of it; a window whose steps are repeated, after a roll back, is profiled once.
    """

    def __init__(self, options: ProfileOptions | None, folder: Path, rank: int, device: torch.device) -> None:
        self.options, self.folder, self.rank, self.device = options, folder, rank, device
        self._windows = options.windows if options is not None and rank in options.ranks else []
        self._running: profile | None = None
        self._window: tuple[int, ...] = (0, 0)  # that is being profiled
        self._seen = (0, 0)  # its first and last profiled step
        self._step: record_function | None = None  # the step that is under way

    def begin(self, number: int) -> None:
        """The attempted step `number` begins; it is profiled if it is in a window."""
        self._leave_step()  # a step that was rolled back has no end
        window = next((w for w in self._windows if w[0] <= number <= w[1]), None)
        if self._running is not None and window != self._window:  # a roll back led out of it
            self.write()
        if window is None:
            return
        if self._running is None:
            self._start(window, number)
        self._step = record_function(f"ProfilerStep#{number}")  # viewers know steps by this name
        self._step.__enter__()

    def end(self, number: int) -> None:
        """The step `number` has ended; the last one of a window has its profile written."""
        if self._running is None:
            return
        self._leave_step()
        self._seen = (self._seen[0], number)
        if number == self._window[1]:
            self.write()

    def _leave_step(self) -> None:
        if self._step is not None:
            self._step.__exit__(None, None, None)
            self._step = None

    def _start(self, window: tuple[int, ...], number: int) -> None:
        assert self.options is not None
        self._window, self._seen = window, (number, number)
        cuda = [ProfilerActivity.CUDA] if self.device.type == "cuda" else []
        self._running = profile(
            activities=[ProfilerActivity.CPU, *cuda], record_shapes=self.options.record_shapes,
            with_stack=self.options.with_stack, profile_memory=self.options.profile_memory,
        )  # fmt: skip
        self._running.start()

    def write(self) -> None:
        """Stop the running profile and write it. Logs a warning if that fails."""
        if self._running is None:
            return
        self._leave_step()
        done, self._running = self._running, None
        self._windows = [window for window in self._windows if window != self._window]
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # or kernels that still run would be missing
        log.info("writing a profile; training goes on after it")
        done.stop()
        first, last = self._seen
        folder = self.folder / f"steps_{first:06d}-{last:06d}"
        steps = f"step {first}" if first == last else f"steps {first} to {last}"
        try:
            self._write(done, folder, f"rank {self.rank}, {steps}")
        except (OSError, RuntimeError, ValueError) as error:  # torch writes the trace, or only a part of it
            log.warning("%s: the profile could not be written (%s); training goes on", folder, error)
        else:
            log.info("profile of %s in %s", steps, folder)

    def _write(self, done: profile, folder: Path, title: str) -> None:
        assert self.options is not None
        folder.mkdir(parents=True, exist_ok=True)
        start = folder / f"rank{self.rank}"
        trace = start.with_suffix(".pt.trace.json")  # the ending that TensorBoard's plugin looks for
        done.export_chrome_trace(str(trace))
        averages = done.key_averages(group_by_input_shape=self.options.record_shapes)
        place = "cuda" if self.device.type == "cuda" else "cpu"
        text = f"{title[0].upper()}{title[1:]}. Times are sums over these steps.\n"
        for order in [f"self_{place}_time_total"] + [f"self_{place}_memory_usage"] * self.options.profile_memory:
            text += f"\nBy {order}:\n{averages.table(sort_by=order, row_limit=self.options.top)}\n"
        start.with_suffix(".operators.txt").write_text(text, encoding="utf-8")
        if self.options.profile_memory:
            try:
                write_memory(trace, start.with_suffix(".memory.json"), title)
            except UserError as error:  # matplotlib is missing; the picture is no reason to end the training
                log.warning("%s", error)


def write_memory(trace: Path, path: Path, title: str) -> None:
    """Write the bytes that tensors hold, {device: [[ms, bytes], ...]}, to `path`, and draw them beside it as .svg.

    `trace`: a file of `torch.profiler.profile.export_chrome_trace`. A CPU's bytes are counted from its start: freeing
    older tensors takes them below zero. Raises UserError, with the numbers written, if matplotlib is not installed.
    """
    events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    # A GPU's track repeats the steps of the CPU's track.
    steps = sorted(
        (e["ts"], e["ts"] + e["dur"], e["name"].replace("ProfilerStep#", "step "))
        for e in events
        if e.get("name", "").startswith("ProfilerStep#") and e.get("cat") == "user_annotation"
    )
    allocations = sorted((e for e in events if e.get("name") == "[memory]"), key=lambda e: e["ts"])
    origin = min([start for start, _, _ in steps] + [e["ts"] for e in allocations[:1]], default=0.0)
    curves: dict[str, list[tuple[float, int]]] = {}
    for event in allocations:
        about = event["args"]
        kind = _DEVICES.get(about["Device Type"], f"device type {about['Device Type']}")
        device = kind if about["Device Id"] < 0 else f"{kind} {about['Device Id']}"
        curves.setdefault(device, []).append(((event["ts"] - origin) / 1000, int(about["Total Allocated"])))
    write_json(path, curves, indent=None)
    with picture(path.with_suffix(".svg"), 10, 4) as figure:
        axis = figure.subplots()
        for number, (start, end, name) in enumerate(steps):
            start_ms, end_ms = (start - origin) / 1000, (end - origin) / 1000
            axis.axvspan(start_ms, end_ms, color="0.95" if number % 2 else "0.9")
            axis.text(start_ms, 0.99, f" {name}", va="top", color="0.4", transform=axis.get_xaxis_transform())
        for device, curve in sorted(curves.items()):
            points = downsample([ms for ms, _ in curve], [size / _MIB for _, size in curve], _BUCKETS)
            peak = max(size for _, size in curve) / _MIB
            axis.step(*zip(*points, strict=True), where="post", linewidth=1, label=f"{device}: peak {peak:.1f} MiB")
        axis.set(title=f"Memory of tensors: {title}", xlabel="ms", ylabel="MiB")
        if curves:
            figure.legend(loc="outside lower left", ncols=len(curves), frameon=False)
