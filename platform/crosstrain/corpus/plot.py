"""Length distributions as a picture."""

from __future__ import annotations

from pathlib import Path

from crosstrain.utils.drawing import picture


def draw(path: Path, charts: dict[str, list[dict[str, int]]]) -> None:
    """One bar chart below another, by title; bars as `crosstrain.corpus.stats.bins` gives them.

    Raises UserError where matplotlib is not installed.
    """
    with picture(path, 9, 3 * len(charts)) as figure:
        axes = figure.subplots(len(charts), squeeze=False)[:, 0]
        for axis, (title, rows) in zip(axes, charts.items(), strict=True):
            axis.bar([_short(row["from"]) for row in rows], [row["documents"] for row in rows])
            axis.set(title=title, xlabel="from this length on", ylabel="documents")


def _short(number: int) -> str:
    for unit, sign in ((1 << 30, "G"), (1 << 20, "M"), (1 << 10, "k")):
        if number >= unit:
            return f"{number // unit}{sign}"
    return str(number)
