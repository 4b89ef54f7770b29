"""Memory over time from a trace of torch's profiler, as numbers and as a picture."""

from __future__ import annotations

import json
from pathlib import Path

from crosstrain.monitor.report.downsample import downsample
from crosstrain.utils.drawing import picture
from crosstrain.utils.files import write_json

_MIB = 1 << 20
_DEVICES = {0: "CPU", 1: "GPU"}  # c10::DeviceType, as traces have it
_BUCKETS = 2000  # of a curve, each with its lowest and its highest point; more are no wider than the picture


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
