"""A stacked bar for each layout: memory of its fullest rank, by what it is for."""

from __future__ import annotations

from pathlib import Path

from crosstrain.utils.drawing import picture
from crosstrain.utils.errors import UserError
from crosstrain.utils.units import show_bytes

# Okabe and Ito's colours, which colour-blind people can tell apart, and two greys.
_COLOURS = {
    "parameters": "#0072B2", "gathered parameters": "#56B4E9", "gradients": "#D55E00", "optimizer": "#E69F00",
    "activations": "#009E73", "logits": "#CC79A7", "temporary": "#999999", "communication": "#444444",
}  # fmt: skip


def draw(path: Path, title: str, bars: list[tuple[str, dict[str, int]]], limit: int | None) -> None:
    """Write `path`, .svg or .png. `bars`: name and bytes by part; `limit`: a device's memory, as a line.

    Raises UserError for another ending, and where matplotlib is not installed.
    """
    if path.suffix.lower() not in (".svg", ".png"):
        raise UserError(f"--picture: {path.name} must end in .svg or .png")
    rows, ends = range(len(bars)), [0] * len(bars)
    with picture(path, 9, 1.4 + 0.35 * len(bars)) as figure:
        axis = figure.subplots()
        for part, colour in _COLOURS.items():
            sizes = [parts.get(part, 0) for _, parts in bars]
            if any(sizes):
                axis.barh(rows, sizes, left=ends, color=colour, label=part)
                ends = [end + size for end, size in zip(ends, sizes, strict=True)]
        for row, end in zip(rows, ends, strict=True):
            axis.text(end, row, f"  {show_bytes(end)}", va="center")
        if limit is not None:
            axis.axvline(limit, color="#CC0000")
            axis.text(limit, -0.6, show_bytes(limit), ha="center", va="bottom", color="#CC0000")
        axis.set_xlim(0, 1.12 * max(*ends, limit or 0, 1))
        axis.set_xticks([])
        axis.set_yticks(rows, [name for name, _ in bars])
        axis.invert_yaxis()
        axis.spines[:].set_visible(False)
        figure.suptitle(title)
        figure.legend(loc="outside lower left", ncols=4, frameon=False)
