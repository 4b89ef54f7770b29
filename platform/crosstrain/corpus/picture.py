"""Length distributions as an SVG picture."""

from __future__ import annotations

from html import escape

from crosstrain import svg

_WIDTH, _HEIGHT, _LEFT, _TOP, _BOTTOM, _GAP = 720, 200, 60, 40, 40, 30


def draw(charts: dict[str, list[dict[str, int]]]) -> str:
    """One bar chart below another, by title; bars as `crosstrain.corpus.report.bins` gives them."""
    step = _HEIGHT + _TOP + _BOTTOM + _GAP
    parts = [_chart(title, rows, i * step) for i, (title, rows) in enumerate(charts.items())]
    return svg.picture(_WIDTH, step * len(charts), parts, font_size=11)


def _chart(title: str, rows: list[dict[str, int]], top: int) -> str:
    highest = max((row["documents"] for row in rows), default=0) or 1
    width = (_WIDTH - _LEFT - 20) / max(len(rows), 1)
    base = top + _TOP + _HEIGHT
    parts = [_text(_LEFT, top + 20, title, size=14), _text(_LEFT - 6, top + _TOP + 8, f"{highest:,}", anchor="end")]
    for i, row in enumerate(rows):
        height, x = _HEIGHT * row["documents"] / highest, _LEFT + i * width
        label = f"{row['from']:,} to {row['to']:,}: {row['documents']:,} documents"
        parts.append(
            f'<rect x="{x + 1:.1f}" y="{base - height:.1f}" width="{width - 2:.1f}" height="{height:.1f}" '
            f'fill="#4477aa"><title>{escape(label)}</title></rect>'
        )
        parts.append(_text(x + width / 2, base + 14, _short(row["from"]), anchor="middle"))
    parts.append(f'<line x1="{_LEFT}" y1="{base}" x2="{_WIDTH - 20}" y2="{base}" stroke="black"/>')
    return "".join(parts)


def _text(x: float, y: float, text: str, *, anchor: str = "start", size: int = 11) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}">{escape(text)}</text>'


def _short(number: int) -> str:
    for unit, sign in ((1 << 30, "G"), (1 << 20, "M"), (1 << 10, "k")):
        if number >= unit:
            return f"{number // unit}{sign}"
    return str(number)
