"""`crosstrain samples`: show the samples of a project as training receives them."""

import argparse
import sys

from crosstrain import Command, printable, registry
from crosstrain.cli.flags import add_config, add_flags

_FLAGS = {
    "--split": {"default": "train", "metavar": "SPLIT", "help": "train (the default), val or test"},
    "--number": {
        "type": int,
        "nargs": "+",
        "metavar": "N",
        "help": "sample numbers: positions in training order, or in file order for val and test (default: 0)",
    },
    "--ids": {"action": "store_true", "help": "show tokens as IDs, not as text"},
}


@registry.register_command("samples")
class SamplesCommand(Command):
    """Show the samples of a project, with the target tokens marked."""

    function = "samples:samples"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        add_config(parser, required=True)
        add_flags(parser, _FLAGS)

    def run(self, arguments: argparse.Namespace) -> None:
        """Print the samples."""
        from .samples import samples

        for view in samples(arguments.cfg_path, arguments.split, arguments.number or [0], arguments.options):
            print(f"{printable(view.title)}\n{view.text(ids=arguments.ids, colour=sys.stdout.isatty())}\n")
