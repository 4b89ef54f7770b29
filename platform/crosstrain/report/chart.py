"""A chart as inline SVG: the curves of several runs over the steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from crosstrain.report.markup import Html, tag
from crosstrain.report.reading import Curve
from crosstrain.report.scale import Axis, show, value_axis
from crosstrain.report.thin import Points, smooth, thin

_WIDTH, _HEIGHT = 560, 230
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 14, 12, 26
_DOTS = 40  # curves of fewer points show each

COLOURS = 8  # classes c0 to c7 of the page's style


@dataclass
class Series:
    """One run's curve."""

    name: str
    number: int  # of the run, which gives the colour
    curve: Curve


def chart(title: str, unit: str, series: Sequence[Series], smoothed: bool = False, steps: int = 0) -> Html:
    """A figure of these curves, none of them empty, over the steps 0 to `steps`, or as far as they go.

    `smoothed`: a moving average in front, the values themselves faintly behind it.
    """
    raw = [thin(s.curve.steps, s.curve.values) for s in series]
    across = Axis(0, max(steps, 1, *(points[-1][0] for points in raw)))
    up, cut = value_axis([value for points in raw for _, value in points])
    frame = [*_grid(across, up)]
    for line, points in zip(series, raw, strict=True):
        average = _average(line.curve) if smoothed and len(line.curve.steps) > 2 * _DOTS else None
        frame += _drawn(line, points, average, across, up)
    picture = tag(
        "svg", frame, tag("line", class_="rule", y1=_TOP, y2=_HEIGHT - _BOTTOM),
        class_="chart", viewBox=f"0 0 {_WIDTH} {_HEIGHT}", role="img", aria_label=title,
        data_left=_LEFT, data_right=_WIDTH - _RIGHT, data_last=across.high,
    )  # fmt: skip
    remarks = [unit] if unit else []
    remarks += ["logarithmic"] if up.logarithmic else []
    remarks += ["highest values cut off"] if cut else []
    caption = tag("figcaption", tag("b", title), " ", tag("span", ", ".join(remarks), class_="unit"))
    return tag("figure", caption, tag("div", picture, tag("div", class_="tip"), class_="plot"))


def _average(curve: Curve) -> Points:
    return thin(curve.steps, smooth(curve.values, len(curve.values) // 100 + 1))


def _drawn(series: Series, points: Points, average: Points | None, across: Axis, up: Axis) -> list[Html]:
    colour = f"c{series.number % COLOURS}" + (" dashed" if series.number // COLOURS % 2 else "")
    data = {
        "data_name": series.name,
        "data_steps": " ".join(str(step) for step, _ in points),
        "data_values": " ".join(f"{value:.6g}" for _, value in points),
    }
    out = [_line(points, across, up, f"raw {colour}" + (" faint" if average else ""), **data)]
    if average:
        out.append(_line(average, across, up, f"average {colour}"))
    if len(points) <= _DOTS:
        out += [tag("circle", class_=colour, cx=x, cy=y, r=2.5) for x, y in _places(points, across, up)]
    return out


def _line(points: Points, across: Axis, up: Axis, class_: str, **data: str) -> Html:
    places = " ".join(f"{x},{y}" for x, y in _places(points, across, up))
    return tag("polyline", class_=class_, points=places, **data)


def _places(points: Points, across: Axis, up: Axis) -> list[tuple[str, str]]:
    return [(f"{_x(step, across):.1f}", f"{_y(value, up):.1f}") for step, value in points]


def _x(step: float, across: Axis) -> float:
    return _LEFT + across.place(step) * (_WIDTH - _LEFT - _RIGHT)


def _y(value: float, up: Axis) -> float:
    return _HEIGHT - _BOTTOM - up.place(value) * (_HEIGHT - _TOP - _BOTTOM)


def _grid(across: Axis, up: Axis) -> list[Html]:
    out = []
    for value in up.marks():
        y = f"{_y(value, up):.1f}"
        out.append(tag("line", class_="grid", x1=_LEFT, x2=_WIDTH - _RIGHT, y1=y, y2=y))
        out.append(tag("text", show(value), x=_LEFT - 6, y=y, dy="0.32em", text_anchor="end"))
    for step in across.marks(6):
        x = f"{_x(step, across):.1f}"
        out.append(tag("line", class_="tick", x1=x, x2=x, y1=_HEIGHT - _BOTTOM, y2=_HEIGHT - _BOTTOM + 4))
        out.append(tag("text", show(step), x=x, y=_HEIGHT - 8, text_anchor="middle"))
    return [*out, tag("line", class_="axis", x1=_LEFT, x2=_WIDTH - _RIGHT, y1=_HEIGHT - _BOTTOM, y2=_HEIGHT - _BOTTOM)]
