"""Charts for plotly.js: the curves of several runs, downsampled without a visible difference.

A page with 5 curves of 1,000,000 steps takes 5 MB (nearly all of it plotly.js) instead of 126 MB.
"""

from collections.abc import Iterable, Sequence
from html import escape
from itertools import accumulate, groupby
from typing import Any

from crosstrain import finite, printable

from .read_run import ReadRun

COLOURS = ("#3b82c4", "#e07b39", "#3fa66b", "#c65b9b", "#8b72d8", "#b8962e", "#3fa9b5", "#d1605e")  # one per run
_BUCKETS = 240  # ranges of steps in a curve: about one per two columns of pixels
_DOTS = 40  # curves with up to this number of points show each point

Chart = dict[str, Any]  # title, remarks on the unit and the axis, and the figure: plotly's `data` and `layout`


def chart(runs: Sequence[ReadRun], key: str, title: str, unit: str = "", smoothed: bool = False) -> Chart:
    """Draw the curve `key` of every run that has it; at least one run must have it.

    `smoothed`: draw the values faintly, with a moving average over them.
    """
    traces: list[dict[str, Any]] = []
    heights: list[float] = []
    for number, run in enumerate(runs):
        if (curve := run.curves.get(key)) is None:
            continue
        steps, values = list(curve), list(curve.values())
        points = downsample(steps, values)
        heights += [value for _, value in points]
        average = smoothed and len(steps) > 2 * _DOTS
        line = {"color": COLOURS[number % len(COLOURS)], "width": 1 if average else 1.6}
        line |= {"dash": "dash"} if number // len(COLOURS) % 2 else {}
        traces.append(
            {
                "name": escape(printable(run.name), quote=False),  # plotly interprets some HTML in names
                "mode": "lines+markers" if len(points) <= _DOTS else "lines",
                "line": line,
                "opacity": 0.3 if average else 1,
                **_xy(points),
            }
        )
        if average:
            mean = _xy(downsample(steps, smooth(values, len(values) // 100 + 1)))
            traces.append({"mode": "lines", "line": line | {"width": 1.6}, "hoverinfo": "skip", **mean})
    y_axis, remark = _y_axis(heights)
    return {
        "title": title,
        "remarks": ", ".join(filter(None, (unit, remark))),
        "figure": {
            "data": traces,
            "layout": {"xaxis": {"range": [0, max(run.last_step for run in runs) or 1]}, "yaxis": y_axis},
        },
    }


def _xy(points: Iterable[tuple[int, float]]) -> dict[str, list[Any]]:
    steps, values = zip(*points, strict=True)
    return {"x": list(steps), "y": [finite(float(f"{value:.6g}")) for value in values]}


def _y_axis(values: Sequence[float]) -> tuple[dict[str, Any], str]:
    """Return an axis and a remark on it; the axis is logarithmic for values that span more than two decades."""
    low, high = min(values), max(values)
    axis: dict[str, Any] = {"exponentformat": "SI" if high >= 1 else "e"}
    if low > 0 and high / low > 100:
        return axis | {"type": "log"}, "logarithmic"
    return axis | {"rangemode": "tozero" if 0 <= low < 0.25 * high else "normal"}, ""


def downsample(steps: Sequence[int], values: Sequence[float], buckets: int = _BUCKETS) -> list[tuple[int, float]]:
    """Return (step, value) pairs: the first, the last, and the lowest and highest in each of `buckets` ranges of steps.

    Even the shortest spikes stay visible. `steps` must ascend, but do not have to be training steps.
    """
    if len(steps) <= 2 * buckets:
        return list(zip(steps, values, strict=True))
    first, span = steps[0], steps[-1] - steps[0] + 1
    kept = {0, len(steps) - 1}
    for _, group in groupby(range(len(steps)), key=lambda i: int((steps[i] - first) * buckets // span)):
        bucket = list(group)
        kept |= {min(bucket, key=values.__getitem__), max(bucket, key=values.__getitem__)}
    return [(steps[i], values[i]) for i in sorted(kept)]


def smooth(values: Sequence[float], reach: int) -> list[float]:
    """Return the mean of each value and up to `reach` values on either side; a centered mean does not lag."""
    sums = [0.0, *accumulate(values)]
    windows = ((max(0, i - reach), min(len(values), i + reach + 1)) for i in range(len(values)))
    return [(sums[high] - sums[low]) / (high - low) for low, high in windows]
