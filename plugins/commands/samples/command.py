"""`crosstrain samples`: show the samples of a project as training receives them."""

import argparse
import sys

from crosstrain import Command, UserError, registry
from crosstrain.cli.flags import add_config, new_file, positive
from crosstrain.utils.errors import printable

from .contact_sheet import contact_sheet

_ASKED = 40  # characters shown below a picture from the end of a text that is not trained on: the question


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
        parser.add_argument("--sheet", type=new_file, metavar="FILE", help="draw the pictures in the samples")

    def run(self, arguments: argparse.Namespace) -> int:
        """Print the samples, and draw their pictures; return the exit code."""
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
        if a.sheet:
            tiles = []
            for view in found:
                said = [
                    (text, "darkgreen") if learned else (text[-_ASKED:], "black") for text, learned in view.turns[:4]
                ]
                tiles += [(picture, [(view.title, "grey"), *said]) for picture in view.pictures]
            if not tiles:
                raise UserError("--sheet: there is no picture in these samples")
            contact_sheet(tiles, a.sheet)
            print(f"{a.sheet}: {len(tiles)} pictures")
        return 0
