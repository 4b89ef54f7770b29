"""`crosstrain drill`: try a project's recovery from faults before a long run."""

import argparse
from pathlib import Path

from crosstrain import Command, UserError, registry
from crosstrain.cli.flags import add_config, add_flags, positive

from .faults import FAULTS

_FLAGS = {
    "--output": {"type": Path, "required": True, "metavar": "FOLDER", "help": "folder to create for both runs"},
    "--steps": {"type": positive, "default": 40, "metavar": "N", "help": "steps of a run (default: 40)"},
    "--faults": {"nargs": "+", "choices": [*FAULTS], "default": [*FAULTS], "help": "kinds (default: all)"},
    "--count": {"type": positive, "default": 4, "metavar": "N", "help": "number of faults (default: 4)"},
    "--seed": {"type": int, "default": 0, "help": "seed of steps and workers (default: 0)"},
}


@registry.register_command("drill")
class DrillCommand(Command):
    """Kill, freeze and slow down workers of a short run, and compare the run with one without faults."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        add_config(parser, required=True)
        add_flags(parser, _FLAGS)

    def run(self, arguments: argparse.Namespace) -> None:
        """Print a table of faults and losses. Raises UserError unless both runs end with the same weights."""
        from .drill import Drill, table

        if arguments.output.exists():
            raise UserError(f"--output: {arguments.output} already exists: remove it, or choose a different folder")
        if arguments.count * 2 > arguments.steps:
            raise UserError(f"--count: {arguments.count} faults need at least {2 * arguments.count} steps; set --steps")
        drill = Drill(
            arguments.cfg_path, arguments.options, arguments.nproc_per_node or 2, arguments.output, arguments.steps
        )
        print(table(drill.run(arguments.faults, arguments.count, arguments.seed)))
        if lost := drill.differences():
            raise UserError(f"the run with faults differs from the one without: {lost}; both are in {drill.folder}")
        print("both runs have the same samples, losses and final weights, bit for bit")
