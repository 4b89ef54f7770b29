"""A stacked bar for each layout: memory of its fullest rank, by what it is for."""

from __future__ import annotations

from html import escape
from pathlib import Path

from crosstrain import svg
from crosstrain.errors import UserError
from crosstrain.extras import require
from crosstrain.planning.units import show_bytes

# Okabe and Ito's colours, which colour-blind people can tell apart, and two greys.
_COLOURS = {
    "parameters": "#0072B2", "gathered parameters": "#56B4E9", "gradients": "#D55E00", "optimizer": "#E69F00",
    "activations": "#009E73", "logits": "#CC79A7", "temporary": "#999999", "communication": "#444444",
}  # fmt: skip
_ROW, _LABEL, _WIDTH, _TOP, _FIGURE = 26, 190, 620, 64, 90


def draw(path: Path, title: str, bars: list[tuple[str, dict[str, int]]], limit: int | None) -> None:
    """Write `path`, .svg or .png. `bars`: name and bytes by part; `limit`: a device's memory, as a line.

    Raises UserError for another ending, and where PNG needs a package that is not installed.
    """
    write = {".svg": _svg, ".png": _png}.get(path.suffix.lower())
    if write is None:
        raise UserError(f"--picture: {path.name} must end in .svg or .png")
    most = max([sum(parts.values()) for _, parts in bars] + [limit or 0, 1])
    scale = _WIDTH / most
    boxes: list[tuple[float, float, float, float, str]] = []  # x, y, width, height, colour
    texts: list[tuple[float, float, str]] = [(8, 14, title)]
    x = 8.0
    for name, colour in _COLOURS.items():
        if any(name in parts for _, parts in bars):
            boxes.append((x, 30, 12, 12, colour))
            texts.append((x + 16, 40, name))
            x += 34 + 6.4 * len(name)
    for number, (label, parts) in enumerate(bars):
        y = _TOP + number * _ROW
        texts.append((8, y + 14, label))
        at = float(_LABEL)
        for name, colour in _COLOURS.items():
            if size := parts.get(name, 0):
                boxes.append((at, y, size * scale, _ROW - 8, colour))
                at += size * scale
        texts.append((at + 6, y + 14, show_bytes(sum(parts.values()))))
    height = _TOP + len(bars) * _ROW + 8
    if limit is not None:
        boxes.append((_LABEL + limit * scale, _TOP - 6, 2, height - _TOP, "#CC0000"))
        texts.append((_LABEL + limit * scale - 30, _TOP - 9, show_bytes(limit)))
    write(path, max(_LABEL + _WIDTH + _FIGURE, int(x)), height, boxes, texts)


def _svg(path: Path, width: int, height: int, boxes: list, texts: list) -> None:
    lines = [f'<rect x="{x:.1f}" y="{y:.1f}" width="{w:.2f}" height="{h:.1f}" fill="{c}"/>' for x, y, w, h, c in boxes]
    lines += [f'<text x="{x:.1f}" y="{y:.1f}">{escape(text)}</text>' for x, y, text in texts]
    path.write_text(svg.picture(width, height, lines), encoding="utf-8")


def _png(path: Path, width: int, height: int, boxes: list, texts: list) -> None:
    image = require("PIL.Image", "--picture with .png")
    drawing, fonts = require("PIL.ImageDraw", "--picture"), require("PIL.ImageFont", "--picture")
    picture = image.new("RGB", (2 * width, 2 * height), "white")  # sharp on dense screens
    pen, font = drawing.Draw(picture), fonts.load_default(size=23)
    for x, y, w, h, colour in boxes:
        pen.rectangle((2 * x, 2 * y, 2 * (x + w), 2 * (y + h)), fill=colour)
    for x, y, text in texts:
        pen.text((2 * x, 2 * y), text, fill="black", font=font, anchor="ls")
    picture.save(path)
