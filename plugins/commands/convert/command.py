"""`crosstrain convert`: write BLIP-2 weights of LAVIS (.pth), or a GGUF file, as a folder for `pretrained`."""

import argparse
from pathlib import Path

from crosstrain import Command, DataError, LimitedProcess, UserError, registry

from .gguf import convert_gguf
from .lavis import convert


@registry.register_command("convert")
class ConvertCommand(Command):
    """Convert BLIP-2 weights of LAVIS from a .pth file, or a language model from a .gguf file."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--input", required=True, metavar="FILE", help=".gguf file, or .pth file of LAVIS, such as blip2_pretrained"
        )
        parser.add_argument("--output", required=True, metavar="FOLDER", help="folder to create")

    def run(self, arguments: argparse.Namespace) -> None:
        """Convert in a process with limits, because the file is from others; only the tensors of a .pth are read."""
        source, output = Path(arguments.input).expanduser(), Path(arguments.output).expanduser()
        if not source.is_file():
            raise DataError(f"--input: {source} is not a file")
        if output.exists():
            raise UserError(f"--output: {output} already exists: remove it, or choose a different folder")
        if source.suffix == ".gguf":
            print(f"wrote {output}, for model.pretrained, with the tokenizer and the {convert_gguf(source, output)}")
        else:
            memory = (1 << 30) + 3 * source.stat().st_size  # the tensors as read, and as written
            written, parts = LimitedProcess(
                convert, f"converting {source}", memory=memory, seconds=1800.0, advice="check the file"
            )((source, output))
            print(f"wrote {written} tensors to {output}; use it as `pretrained` of {', '.join(parts)}")
