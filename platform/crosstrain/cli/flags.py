"""Flags, argparse types and an input prompt that several commands share."""

import argparse
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from crosstrain.config.registry import registry
from crosstrain.utils import paths
from crosstrain.utils.errors import CheckpointError, UserError, printable, sentence
from crosstrain.utils.storage import is_url


def positive(text: str) -> int:
    """Convert the text of a flag to a whole number above 0, as a `type` for argparse."""
    if not (text.isdecimal() and int(text)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def seconds(text: str) -> float:
    """Convert the text of a flag to a time above 0, as a `type` for argparse."""
    if not float(text) > 0:
        raise ValueError
    return float(text)


def folder(text: str) -> Path:
    """Convert the text of a flag to an existing folder, as a `type` for argparse."""
    if not Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"{text} is not a folder")
    return Path(text)


def new_file(text: str) -> Path:
    """Convert the text of a flag to the path of a file in an existing folder, as a `type` for argparse."""
    folder(str(Path(text).absolute().parent))
    return Path(text)


def ask() -> str:
    """Read a line of input, and echo the line unless input is a terminal. Raises EOFError at the end of the input."""
    line = input("> " if sys.stdin.isatty() else "")
    if not sys.stdin.isatty():
        print(f"> {printable(line)}")
    return line


# Flags of commands that open a checkpoint.
CHECKPOINT: dict[str, dict[str, Any]] = {
    "--checkpoint": {"required": True, "metavar": "DIR", "help": "path or URL of a checkpoint, or of a run's folder"},
    "--trust-data": {
        "action": "store_true",
        "help": "open the data and pretrained weights that a checkpoint names, although you did not train it",
    },
}
WEIGHTS: dict[str, dict[str, Any]] = {
    "--weights": {
        "metavar": "NAME",
        "help": "use the weights that this callback kept, such as ema (default: the trained weights)",
    }
}


def add_flags(parser: argparse._ActionsContainer, flags: Mapping[str, Mapping[str, Any]]) -> None:
    """Add flags. flags: the flag's names, separated by spaces -> keywords for argparse's `add_argument`."""
    for names, how in flags.items():
        parser.add_argument(*names.split(), **how)


def add_options(parser: argparse.ArgumentParser, help: str) -> None:
    """Add `--options KEY=VALUE ...`, which may be given several times."""
    parser.add_argument("--options", nargs="+", action="extend", default=[], metavar="KEY=VALUE", help=help)


def add_config(parser: argparse.ArgumentParser, *, required: bool) -> None:
    parser.add_argument("--cfg-path", required=required, metavar="FILE", help="project file")
    add_options(parser, "options to override, such as run.seed=1; may be given several times")
    add_flags(
        parser,
        {
            "--nproc-per-node": {
                "type": int,
                "metavar": "N",
                "help": "number of workers per machine (default: one per GPU, or one without a GPU)",
            },
            "--local_rank --local-rank": {"type": int, "help": argparse.SUPPRESS},  # ignored; LOCAL_RANK is used
        },
    )
    parser.set_defaults(as_given=True)  # the command does not change the project and options


def check_arguments(arguments: argparse.Namespace) -> None:
    """Raise UserError for mistakes in a project file and for missing files, before a command imports torch."""
    if project := getattr(arguments, "cfg_path", None):
        paths.find(project)
    place = getattr(arguments, "checkpoint", ".")
    checkpoint = Path(place)
    if not is_url(place) and not os.path.lexists(checkpoint):
        raise CheckpointError(paths.missing(checkpoint, [checkpoint]))
    if project and getattr(arguments, "as_given", False):
        from crosstrain.config.load import check_names

        try:
            check_names(project, arguments.options)
        except UserError:
            programs = registry.instances("hints").values()
            for note in filter(None, (each.of_file(Path(paths.find(project))) for each in programs)):
                print(sentence(f"note: {note}"), file=sys.stderr)
            raise
