"""Drawing with matplotlib, which is imported on first use."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from crosstrain.utils.optional_deps import require


@contextmanager
def picture(path: Path, width: float, height: float) -> Iterator[Any]:
    """Yield an empty matplotlib figure of this size in inches, and save it to `path` (.svg or .png) after the block.

    Raises UserError if matplotlib is not installed.
    """
    matplotlib = require("matplotlib", f"drawing {path.name}")
    figure = require("matplotlib.figure", f"drawing {path.name}").Figure((width, height), layout="constrained")
    # Keep text as text, allow dollar signs in names, and write identical files for identical numbers.
    settings = {"svg.fonttype": "none", "text.parse_math": False, "svg.hashsalt": "crosstrain", "font.size": 9}
    with matplotlib.rc_context(settings):
        yield figure
        figure.savefig(path, dpi=200, metadata={"Date": None} if path.suffix == ".svg" else None)
