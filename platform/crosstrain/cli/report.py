"""`crosstrain report`: one HTML page about one or several runs."""

import argparse
from itertools import chain
from pathlib import Path

from crosstrain.monitor.report.page import page
from crosstrain.monitor.report.read_run import read_runs
from crosstrain.monitor.status import find_runs
from crosstrain.utils.errors import UserError, os_errors_as, printable
from crosstrain.utils.files import write_atomically
from crosstrain.utils.storage import is_url


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a run's folder (run.output_dir), or a folder of runs")
    parser.add_argument("--output", default="report.html", metavar="FILE", help="the page (default: report.html)")


def run(arguments: argparse.Namespace) -> int:
    """Write the page; returns the exit code. Raises UserError for a folder without a run and an output that fails."""
    path = Path(arguments.output)
    if path.is_dir():
        raise UserError(f"--output: {path} is a folder; name the page's file")
    places = [[place] if is_url(place) else [*map(str, find_runs([place]))] or [place] for place in arguments.runs]
    runs = read_runs([*chain(*places)])
    with os_errors_as(UserError, f"--output: {path} cannot be written"):
        write_atomically(path, page(runs))
    for found in runs:
        for problem in found.problems:
            print(printable(f"note: {problem}"))
    print(f"{path}: {len(runs)} run(s), {path.stat().st_size / 1024:.0f} KiB; open it in any browser")
    return 0
