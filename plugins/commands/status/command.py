"""`crosstrain status`: print one line for each run below the given folders."""

import argparse
import json
import sys
from typing import Any

from crosstrain import Command, UserError, finite, printable, registry
from crosstrain.utils.storage import is_url

from ..units import show_seconds
from .status import find_runs, status


@registry.register_command("status")
class StatusCommand(Command):
    """List the runs below a folder, with their state, step and loss."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "folders",
            nargs="*",
            default=["output"],
            metavar="FOLDER",
            help="folders to search for runs, including all subfolders (default: output)",
        )
        parser.add_argument("--json", action="store_true", help="print one JSON object per run, for scripts")

    def run(self, arguments: argparse.Namespace) -> None:
        """Print the table. Raises UserError if there is no run."""
        if url := next(filter(is_url, arguments.folders), None):
            raise UserError(f"{url}: only local folders are searched; `crosstrain report` reads a run in a bucket")
        found = []
        for folder in find_runs(arguments.folders):
            try:
                found.append(status(folder))
            except OSError as error:
                print(printable(f"note: {folder}: its log cannot be read ({error.strerror})"), file=sys.stderr)
        if not found:
            raise UserError(
                f"no run found in or below {', '.join(arguments.folders)}; give run.output_dir or a folder above it"
            )
        if arguments.json:
            print(*(json.dumps(finite(one)) for one in found), sep="\n")
            return
        rows = [("run", "state", "step", "loss", "saved", "logged", "last line of the log"), *map(_row, found)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for row in rows:
            print(printable("  ".join(f"{text:<{width}}" for text, width in zip(row, widths, strict=True)).rstrip()))


def _row(one: dict[str, Any]) -> tuple[str, ...]:
    step = "-" if one["step"] is None else f"{one['step']}/{one['max_iters']}" if one["max_iters"] else str(one["step"])
    loss, saved = ("-" if value is None else f"{value:.7g}" for value in (one["loss"], one["checkpoint"]))
    if one["weights"] is not None:
        saved += f" sha256:{one['weights'][:12]}"
    silent = f"{show_seconds(one['silent_seconds'])} ago"
    return one["run"], one["state"], step, loss, saved, silent, one["last_line"][:100]
