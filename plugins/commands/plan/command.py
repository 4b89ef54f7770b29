"""`crosstrain plan`: estimate the costs of a project, and check whether it fits, before it starts."""

import argparse

from crosstrain import Command, registry
from crosstrain.cli.flags import add_config, positive

from .flags import add_budget, budget, show


@registry.register_command("plan")
class PlanCommand(Command):
    """Estimate memory, time and traffic of a project under each runner."""

    function = "api:plan"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        add_config(parser, required=True)
        parser.add_argument("--world-size", type=positive, metavar="N", help="ranks, there or not (default: as train)")
        add_budget(parser)

    def run(self, arguments: argparse.Namespace) -> int:
        """Print the plan of a project, write it to --output if given, and return the exit code."""
        from .api import plan

        a = arguments
        size = a.world_size or a.nproc_per_node
        made = plan(a.cfg_path, a.options, world_size=size, **budget(vars(a)))
        show(made, vars(a))
        return 0
