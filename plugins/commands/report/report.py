"""Write one HTML page about runs."""

from collections.abc import Sequence
from pathlib import Path

from crosstrain import UserError
from crosstrain.utils.errors import os_errors_as
from crosstrain.utils.files import write_atomically
from crosstrain.utils.storage import is_url

from ..status.status import find_runs
from .page import page
from .read_run import ReadRun, read_runs


def report(runs: Sequence[str | Path], output: str | Path = "report.html") -> list[ReadRun]:
    """Write one HTML page about runs, given by their folders or URLs, or by folders that hold runs.

    Returns the runs as read, with the `problems` found in their files. Raises UserError if there is no run, or if
    `output` cannot be written.
    """
    places: list[str] = []
    for place in map(str, runs):
        places += [place] if is_url(place) else [str(folder) for folder in find_runs([place])] or [place]
    found = read_runs(places)
    with os_errors_as(UserError, f"--output: {output} cannot be written"):
        write_atomically(Path(output), page(found))
    return found
