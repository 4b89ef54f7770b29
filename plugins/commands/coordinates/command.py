"""`crosstrain coordinates`: check that activations do not depend on the width of a model."""

import argparse

from crosstrain import Command, registry
from crosstrain.cli.flags import add_config, positive


@registry.register_command("coordinates")
class CoordinatesCommand(Command):
    """Show which activations grow with the width of a model, before training and after a few steps."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        add_config(parser, required=True)
        parser.add_argument(
            "--width",
            nargs="+",
            action="append",
            required=True,
            metavar="KEY=VALUE",
            help="options of one width, such as model.n_embd=128 model.n_head=4; give --width once for each width, "
            "from narrow to wide",
        )
        parser.add_argument("--steps", type=positive, default=5, metavar="N", help="steps of training (default: 5)")

    def run(self, arguments: argparse.Namespace) -> None:
        """Print a table of the activations that change most."""
        from .coordinates import measure, table

        a = arguments
        print(table([measure(a.cfg_path, [*a.options, *width], a.steps) for width in a.width]))
