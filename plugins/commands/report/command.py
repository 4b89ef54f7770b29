"""`crosstrain report`: write one HTML page about one or several runs."""

import argparse
from pathlib import Path

from crosstrain import Command, UserError, printable, registry


@registry.register_command("report")
class ReportCommand(Command):
    """Write one HTML page about runs: curves, timings, differences."""

    function = "page:report"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "runs", nargs="+", metavar="RUN", help="a run's folder (run.output_dir), or a folder of runs"
        )
        parser.add_argument(
            "--output", default="report.html", metavar="FILE", help="page to write (default: report.html)"
        )

    def run(self, arguments: argparse.Namespace) -> None:
        """Write the page. Raises UserError if there is no run, or the page cannot be written."""
        from .page import report

        path = Path(arguments.output)
        if path.is_dir():
            raise UserError(f"--output: {path} is a folder; give the name of a file")
        runs = report(arguments.runs, path)
        for found in runs:
            for problem in found.problems:
                print(printable(f"note: {problem}"))
        print(f"{path}: {len(runs)} run(s), {path.stat().st_size / 1024:.0f} KiB; open it in any browser")
