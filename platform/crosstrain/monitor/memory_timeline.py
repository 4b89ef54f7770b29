"""Memory over time, out of a trace of torch's profiler, as a picture and as numbers."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

from crosstrain import svg
from crosstrain.report.thin import thin

_MIB = 1 << 20
_DEVICES = {0: "CPU", 1: "GPU"}  # c10::DeviceType, as traces have it
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7")
_WIDTH, _HEIGHT, _LEFT, _TOP, _BOTTOM = 900, 300, 70, 50, 40
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


def draw(memory: Memory, path: Path, title: str) -> None:
    """Write the curves as an SVG, and beside it, ending in .json, as {device: [[ms, bytes], ...]}."""
    path.with_suffix(".json").write_text(json.dumps(memory.curves), encoding="utf-8")
    every = [point for curve in memory.curves.values() for point in curve]
    end = max([ms for ms, _ in every] + [end for _, _, end in memory.steps] + [1e-3])
    low = min([size for _, size in every] + [0])
    high = max([size for _, size in every] + [low + 1])

    def x(ms: float) -> float:
        return _LEFT + ms / end * _WIDTH

    def y(size: float) -> float:
        return _TOP + (high - size) / (high - low) * _HEIGHT

    width, height = _LEFT + _WIDTH + 20, _TOP + _HEIGHT + _BOTTOM
    lines = [f'<text x="8" y="18">Memory of tensors in MiB: {escape(title)}</text>']
    for number, (name, start, stop) in enumerate(memory.steps):
        shade = "#f3f3f3" if number % 2 else "#e6e6e6"
        span = f'x="{x(start):.1f}" width="{max(x(stop) - x(start), 0.5):.1f}"'
        lines.append(f'<rect {span} y="{_TOP}" height="{_HEIGHT}" fill="{shade}"/>')
        lines.append(f'<text x="{x(start) + 4:.1f}" y="{_TOP + 14}" fill="#666">{escape(name)}</text>')
    for part in range(5):
        size = low + (high - low) * part / 4
        lines.append(f'<line x1="{_LEFT}" x2="{_LEFT + _WIDTH}" y1="{y(size):.1f}" y2="{y(size):.1f}" stroke="#ccc"/>')
        lines.append(f'<text x="{_LEFT - 6}" y="{y(size) + 4:.1f}" text-anchor="end">{size / _MIB:.3g}</text>')
    for number, (device, curve) in enumerate(sorted(memory.curves.items())):
        colour = _COLOURS[number % len(_COLOURS)]
        points = thin([ms for ms, _ in curve], [size for _, size in curve], _BUCKETS)
        corners = " ".join(f"H{x(ms):.1f}V{y(size):.1f}" for ms, size in points)
        lines.append(f'<path d="M{_LEFT},{y(curve[0][1]):.1f} {corners}" fill="none" stroke="{colour}"/>')
        peak = max(size for _, size in curve) / _MIB
        label = f"{escape(device)}: peak {peak:.1f} MiB"
        lines.append(f'<text x="{_LEFT + 220 * number}" y="{_TOP - 12}" fill="{colour}">{label}</text>')
    for part in range(5):
        ms = end * part / 4
        lines.append(f'<text x="{x(ms):.1f}" y="{_TOP + _HEIGHT + 18}" text-anchor="middle">{ms:.1f} ms</text>')
    path.write_text(svg.picture(width, height, lines), encoding="utf-8")
