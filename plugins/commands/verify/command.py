"""`crosstrain verify`: accept a runner if it agrees with plain torch in every part of a run."""

import argparse
import json
import shlex
import sys

from crosstrain import Command, UserError, registry
from crosstrain.cli.flags import add_config, new_file, positive


@registry.register_command("verify")
class VerifyCommand(Command):
    """Accept a runner: one page of checks against plain torch."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        add_config(parser, required=True)
        parser.add_argument(
            "--runners",
            nargs="+",
            default=[],
            metavar="RUNNER[@N]",
            help="runners or presets and their number of workers (default: the project's, and 2 unless "
            "--nproc-per-node says another)",
        )
        parser.add_argument("--steps", type=positive, default=3, metavar="K", help="steps of a training (default: 3)")
        parser.add_argument("--output", type=new_file, metavar="FILE", help="write the page, and JSON beside it")

    def run(self, arguments: argparse.Namespace) -> int:
        """Verify the runners; return 0 if each passes every check. Raises UserError if one does not."""
        from .verify import Check, page, verify

        a, checks = arguments, dict[str, list[Check]]()
        for label, row in verify(a.cfg_path, a.runners, a.options, a.nproc_per_node or 2, a.steps):
            checks.setdefault(label, []).append(row)
            print(f"{label}: {': '.join(row)}", flush=True)
        text = page(checks, shlex.join(["crosstrain", *sys.argv[1:]]))
        print(f"\n{text}", end="")
        if a.output:
            a.output.write_text(text, encoding="utf-8")
            a.output.with_suffix(".json").write_text(json.dumps(checks, indent=1) + "\n", encoding="utf-8")
        if failed := [label for label, rows in checks.items() if any(result == "no" for _, result, _ in rows)]:
            raise UserError(f"{len(failed)} of {len(checks)} not verified: {', '.join(failed)}")
        return 0
