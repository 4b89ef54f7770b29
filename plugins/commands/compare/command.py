"""`crosstrain compare`: train a project for a few steps under each runner, and check that the runners agree."""

import argparse
import json

from crosstrain import Command, UserError, finite, registry
from crosstrain.cli.flags import add_config, add_flags, folder, new_file, positive

_FLAGS = {
    "--runners": {
        "nargs": "+",
        "required": True,
        "metavar": "RUNNER[@N]",
        "help": "runners or presets, each with its number of workers (default: --nproc-per-node, or 1); "
        "the first is the reference",
    },
    "--steps": {"type": positive, "default": 5, "metavar": "K", "help": "training steps per runner (default: 5)"},
    "--deep": {
        "action": "store_true",
        "help": "also evaluate, save and resume with each runner; micro batches differ in their number of targets",
    },
    "--scratch": {
        "type": folder,
        "metavar": "DIR",
        "help": "existing folder in which to store the reference's tensors temporarily",
    },
    "--output": {"type": new_file, "metavar": "FILE", "help": "write all measurements as JSON"},
}


@registry.register_command("compare")
class CompareCommand(Command):
    """Compare runners on your project: do they train alike?"""

    function = "compare:compare"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        add_config(parser, required=True)
        parser.set_defaults(as_given=False)  # `--runners` replaces the project's runner
        add_flags(parser, _FLAGS)

    def run(self, arguments: argparse.Namespace) -> None:
        """Compare the runners. Raises UserError if a runner fails or differs from the first one."""
        from .compare import compare

        failures, results = compare(
            arguments.cfg_path,
            arguments.runners,
            arguments.options,
            nproc_per_node=arguments.nproc_per_node,
            steps=arguments.steps,
            deep=arguments.deep,
            scratch=arguments.scratch,
        )
        if arguments.output:
            arguments.output.write_text(json.dumps(finite(results), indent=1) + "\n", encoding="utf-8")
        if failures:
            failed = [label for label in failures if "error" in results[label]]
            told = {
                f"do not train like {arguments.runners[0]}": [f for f in failures if f not in failed],
                "failed": failed,
            }
            number = len(arguments.runners) - 1
            raise UserError("; ".join(f"{len(f)} of {number} {what}: {', '.join(f)}" for what, f in told.items() if f))
        apart = not all(record["exact"] for record in results.values())
        print(
            f"all train like {arguments.runners[0]}"
            + ", as far as runners whose ranks step independently can be compared" * apart
        )
