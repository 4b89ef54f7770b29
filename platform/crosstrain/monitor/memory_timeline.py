"""Memory over time, out of a trace of torch's profiler, as a picture and as numbers."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

from crosstrain.monitor.report.downsample import thin
from crosstrain.utils.drawing import picture
from crosstrain.utils.files import write_json

_MIB = 1 << 20
_DEVICES = {0: "CPU", 1: "GPU"}  # c10::DeviceType, as traces have it
_BUCKETS = 2000  # of a curve, each with its lowest and its highest point; more are no wider than the picture


@dataclass
class Memory:
    """What a trace says: milliseconds since its first step, and bytes that tensors hold, by device; the steps' spans.

    On a CPU, allocations are counted from where the trace begins: what was there before is not in it, and what was
    given back of it counts below zero.
    """

    curves: dict[str, list[tuple[float, int]]] = field(default_factory=dict)
    steps: list[tuple[str, float, float]] = field(default_factory=list)  # name, start, end


def read_memory(trace: Path) -> Memory:
    """From a trace file as `torch.profiler.profile.export_chrome_trace` writes it."""
    events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    # A GPU's own track repeats the steps; the CPU's is where they are made.
    steps = sorted(
        (e["ts"], e["ts"] + e["dur"], e["name"].replace("ProfilerStep#", "step "))
        for e in events
        if e.get("name", "").startswith("ProfilerStep#") and e.get("cat") == "user_annotation"
    )
    allocations = [e for e in events if e.get("name") == "[memory]"]
    origin = min([start for start, _, _ in steps] + [e["ts"] for e in allocations], default=0.0)
    out = Memory(steps=[(name, (start - origin) / 1000, (end - origin) / 1000) for start, end, name in steps])
    for event in sorted(allocations, key=lambda e: e["ts"]):
        about = event["args"]
        kind = _DEVICES.get(about["Device Type"], f"device type {about['Device Type']}")
        device = kind if about["Device Id"] < 0 else f"{kind} {about['Device Id']}"
        out.curves.setdefault(device, []).append(((event["ts"] - origin) / 1000, int(about["Total Allocated"])))
    return out


def write_memory(memory: Memory, path: Path, title: str) -> None:
    """Write {device: [[ms, bytes], ...]} to `path`, a .json, and draw the curves beside it as an .svg.

    Raises UserError where matplotlib, for the picture, is not installed.
    """
    write_json(path, memory.curves, indent=None)
    with picture(path.with_suffix(".svg"), 10, 4) as figure:
        axis = figure.subplots()
        for number, (name, start, end) in enumerate(memory.steps):
            axis.axvspan(start, end, color="0.95" if number % 2 else "0.9")
            axis.text(start, 0.99, f" {name}", va="top", color="0.4", transform=axis.get_xaxis_transform())
        for device, curve in sorted(memory.curves.items()):
            points = thin([ms for ms, _ in curve], [size / _MIB for _, size in curve], _BUCKETS)
            peak = max(size for _, size in curve) / _MIB
            axis.step(*zip(*points, strict=True), where="post", linewidth=1, label=f"{device}: peak {peak:.1f} MiB")
        axis.set(title=f"Memory of tensors: {title}", xlabel="ms", ylabel="MiB")
        if memory.curves:
            figure.legend(loc="outside lower left", ncols=len(memory.curves), frameon=False)
