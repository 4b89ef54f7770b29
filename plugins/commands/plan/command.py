"""`crosstrain plan`: estimate the costs of a project, and check whether it fits into memory, before it starts."""

import argparse
import json

from crosstrain import Command, registry
from crosstrain.cli.flags import add_config, add_flags, new_file, positive

_FLAGS = {
    "--world-size": {
        "type": positive,
        "metavar": "N",
        "help": "number of ranks; they do not have to exist (default: as for train)",
    },
    "--device-memory": {
        "metavar": "SIZE",
        "help": "device memory per rank, such as 24GiB; shows whether the project fits",
    },
    "--throughput": {"metavar": "FLOPS", "help": "FLOP/s per device, such as 150T; shows the duration in days"},
    "--tokens-per-second": {"metavar": "N", "help": "measured speed of all ranks together; shows the duration in days"},
    "--tokens": {"metavar": "N", "help": "number of training tokens, such as 2.5B (default: from run.max_iters)"},
    "--no-presets": {"action": "store_true", "help": "plan only the project's own runner"},
    "--output": {"type": new_file, "metavar": "FILE", "help": "write the plan as JSON"},
}


@registry.register_command("plan")
class PlanCommand(Command):
    """Estimate memory, time and traffic of a project under each runner."""

    function = "plan:plan"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        add_config(parser, required=True)
        add_flags(parser, _FLAGS)

    def run(self, arguments: argparse.Namespace) -> None:
        """Print the plan of a project, and write the plan to --output."""
        from .plan import plan

        made = plan(
            arguments.cfg_path,
            arguments.options,
            world_size=arguments.world_size or arguments.nproc_per_node,
            presets=not arguments.no_presets,
            device_memory=arguments.device_memory,
            throughput=arguments.throughput,
            tokens_per_second=arguments.tokens_per_second,
            tokens=arguments.tokens,
        )
        print(made)
        if arguments.output:
            arguments.output.write_text(json.dumps(made.as_json(), indent=1) + "\n", encoding="utf-8")
