"""`crosstrain convert`: write BLIP-2 weights of LAVIS (.pth), or a GGUF file, as a folder for `pretrained`."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from crosstrain import Command, DataError, LimitedProcess, UserError, registry, require

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

    def run(self, arguments: argparse.Namespace) -> int:
        """Convert in a process with limits, because a .pth file is a pickle; only its tensors are read."""
        source, output = Path(arguments.input).expanduser(), Path(arguments.output).expanduser()
        if not source.is_file():
            raise DataError(f"--input: {source} is not a file")
        if output.exists():
            raise UserError(f"--output: {output} already exists: remove it, or choose a different folder")
        memory = (1 << 30) + 3 * source.stat().st_size  # the tensors as read, and as written
        if source.suffix == ".gguf":
            require("gguf", "crosstrain convert")
            written, precision = _limited(convert_gguf, source, 20 * memory)((source, output))  # 4 bits become 32
            print(f"wrote {written} tensors and the tokenizer to {output}, for model.pretrained; {precision}")
        else:
            written, parts = _limited(convert, source, memory)((source, output))
            print(f"wrote {written} tensors to {output}; use it as `pretrained` of {', '.join(parts)}")
        return 0


def _limited(function: Callable[[Any], Any], source: Path, memory: int) -> LimitedProcess:
    return LimitedProcess(function, f"converting {source}", memory=memory, seconds=1800.0, advice="check the file")
