"""`crosstrain verify`: check that a runner agrees with plain PyTorch in every part of a run."""

import argparse
import json
import shlex
import sys

from crosstrain import Command, UserError, registry
from crosstrain.cli.flags import add_config, add_flags, new_file, positive

_FLAGS = {
    "--runners": {
        "nargs": "+",
        "default": [],
        "metavar": "RUNNER[@N]",
        "help": "runners or presets, each with its number of workers (default: the project's runner, with "
        "--nproc-per-node workers, or 2)",
    },
    "--steps": {"type": positive, "default": 3, "metavar": "K", "help": "number of training steps (default: 3)"},
    "--output": {
        "type": new_file,
        "metavar": "FILE",
        "help": "write the report to FILE, and the results as JSON to a file of the same name with .json",
    },
}


@registry.register_command("verify")
class VerifyCommand(Command):
    """Test a runner against plain PyTorch, and print a one-page report."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        add_config(parser, required=True)
        add_flags(parser, _FLAGS)

    def run(self, arguments: argparse.Namespace) -> None:
        """Verify the runners. Raises UserError if a runner fails a check."""
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
