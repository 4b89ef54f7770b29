"""`crosstrain report`: one HTML page about one or several runs."""

from __future__ import annotations

from pathlib import Path

from crosstrain.monitor.report.page import page
from crosstrain.monitor.report.read_run import read_runs
from crosstrain.utils.errors import UserError, printable
from crosstrain.utils.files import write_atomically


def report(folders: list[str], output: str) -> int:
    """Write the page about the runs in `folders` to `output`; returns the exit code.

    Raises UserError for a folder that holds no run and where the page cannot be written.
    """
    path = Path(output)
    if path.is_dir():
        raise UserError(f"--output: {path} is a folder; name the page's file")
    runs = read_runs(folders)
    try:
        write_atomically(path, page(runs))
    except OSError as error:
        raise UserError(f"--output: {path} cannot be written ({error.strerror})") from None
    for run in runs:
        for problem in run.problems:
            print(printable(f"note: {run.name}: {problem}"))
    print(f"{path}: {len(runs)} run(s), {path.stat().st_size / 1024:.0f} KiB; open it in any browser")
    return 0
