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

        a = arguments
        if a.output.exists():
            raise UserError(f"--output: {a.output} already exists: remove it, or choose a different folder")
        if a.count * 2 > a.steps:
            raise UserError(f"--count: {a.count} faults need at least {2 * a.count} steps; set --steps")
        drill = Drill(a.cfg_path, a.options, a.nproc_per_node or 2, a.output, a.steps)
        print(table(drill.run(a.faults, a.count, a.seed)))
        if lost := drill.differences():
            raise UserError(f"the run with faults differs from the one without: {lost}; both are in {a.output}")
        print("both runs have the same samples, losses and final weights, bit for bit")
