"""`crosstrain convert`: write BLIP-2 weights of LAVIS (.pth) as a folder for `pretrained`."""

import argparse
from pathlib import Path

from crosstrain import Command, DataError, LimitedProcess, UserError, registry

from .lavis import convert


@registry.register_command("convert")
class ConvertCommand(Command):
    """Convert BLIP-2 weights of LAVIS from a .pth file."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--input", required=True, metavar="FILE", help=".pth file of LAVIS, such as blip2_pretrained"
        )
        parser.add_argument("--output", required=True, metavar="FOLDER", help="folder to create")

    def run(self, arguments: argparse.Namespace) -> int:
        """Convert in a process with limits, because a .pth file is a pickle; only its tensors are read."""
        source, output = Path(arguments.input).expanduser(), Path(arguments.output).expanduser()
        if not source.is_file():
            raise DataError(f"--input: {source} is not a file")
        if output.exists():
            raise UserError(f"--output: {output} already exists: remove it, or choose a different folder")
        memory = (1 << 30) + 3 * source.stat().st_size  # the tensors as read, and as written
        process = LimitedProcess(
            convert, f"converting {source}", memory=memory, seconds=1800.0, advice="check the file"
        )
        written, parts = process((source, output))
        print(f"wrote {written} tensors to {output}; use it as `pretrained` of {', '.join(parts)}")
        return 0
