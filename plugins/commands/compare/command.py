"""`crosstrain compare`: train a project for a few steps under each runner, and check that they agree."""

import argparse
import json

from crosstrain import Command, UserError, registry
from crosstrain.cli.flags import add_config, new_file, positive
from crosstrain.utils.units import finite


@registry.register_command("compare")
class CompareCommand(Command):
    """Compare runners on your project: do they train alike?"""

    function = "compare:compare"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        add_config(parser, required=True)
        parser.set_defaults(as_given=False)  # `--runners` replaces the project's runner
        parser.add_argument(
            "--runners",
            nargs="+",
            required=True,
            metavar="RUNNER[@N]",
            help="runners or presets and their number of workers (default: as --nproc-per-node, or 1); "
            "the first is the reference",
        )
        parser.add_argument("--steps", type=positive, default=5, metavar="K", help="steps under each (default: 5)")
        parser.add_argument(
            "--deep",
            action="store_true",
            help="also evaluate, save and resume under each, with an uneven number of targets",
        )
        parser.add_argument("--output", type=new_file, metavar="FILE", help="write all measurements as JSON")

    def run(self, arguments: argparse.Namespace) -> int:
        """Compare the runners; return 0 if all agree with the first. Raises UserError if one does not."""
        a = arguments
        from .compare import compare

        failures, results = compare(
            a.cfg_path,
            a.runners,
            a.options,
            nproc_per_node=a.nproc_per_node,
            steps=a.steps,
            deep=a.deep,
        )
        if a.output:
            a.output.write_text(json.dumps(finite(results), indent=1) + "\n", encoding="utf-8")
        if failures:
            failed = [label for label in failures if "error" in results[label]]
            told = {f"do not train as {a.runners[0]}": [f for f in failures if f not in failed], "failed": failed}
            number = len(a.runners) - 1
            raise UserError("; ".join(f"{len(f)} of {number} {what}: {', '.join(f)}" for what, f in told.items() if f))
        apart = not all(record["exact"] for record in results.values())
        print(f"all train as {a.runners[0]}" + ", as far as steps that ranks make apart can be compared" * apart)
        return 0
