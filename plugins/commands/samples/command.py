"""`crosstrain samples`: show the samples of a project as training receives them."""

import argparse
import sys

from crosstrain import Command, UserError, registry
from crosstrain.cli.flags import add_config, positive
from crosstrain.utils.errors import printable


@registry.register_command("samples")
class SamplesCommand(Command):
    """Show the samples of a project, with the trained tokens marked."""

    function = "samples:samples"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        add_config(parser, required=True)
        parser.add_argument("--split", default="train", metavar="SPLIT", help="train (the default), val or test")
        parser.add_argument(
            "--number",
            type=int,
            nargs="+",
            metavar="N",
            help="in the order of training, of val and test in file order (default: 0)",
        )
        parser.add_argument("--step", type=positive, metavar="N", help="instead: all that a rank is given at this step")
        parser.add_argument(
            "--rank", type=int, default=0, metavar="R", help="of --step: data-parallel rank (default: 0)"
        )
        parser.add_argument("--ids", action="store_true", help="show tokens as ids, not as text")

    def run(self, arguments: argparse.Namespace) -> int:
        """Print the samples; return the exit code."""
        from .samples import samples

        a = arguments
        if a.number and a.step:
            raise UserError("--number, --step: give one of them")
        found = samples(
            a.cfg_path,
            a.split,
            a.number or [0],
            a.options,
            step=a.step,
            rank=a.rank,
            nproc_per_node=a.nproc_per_node or 1,
        )
        for view in found:
            print(f"{printable(view.title)}\n{view.text(ids=a.ids, colour=sys.stdout.isatty())}\n")
        return 0
