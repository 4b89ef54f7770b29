"""`crosstrain export`: a checkpoint as a plain Hugging Face model folder."""

from __future__ import annotations

import argparse
from pathlib import Path

from crosstrain.cli.flags import add_checkpoint
from crosstrain.utils.units import read_bytes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_checkpoint(parser)
    parser.add_argument("--output", required=True, metavar="DIR", help="a folder that is empty or does not exist")
    parser.add_argument("--dtype", choices=("fp32", "bf16", "fp16"), help="convert to it (default: as it is stored)")
    parser.add_argument("--max-shard-size", default="5GB", metavar="SIZE", help="begin another file beyond this")
    parser.add_argument("--options", nargs="+", default=[], metavar="KEY=VALUE",
                        help="change the configuration that names the source of frozen parameters")  # fmt: skip


def run(arguments: argparse.Namespace) -> int:
    """Write the checkpoint to the output folder; returns the exit code."""
    from crosstrain.checkpoint.checkpointer import load_state
    from crosstrain.checkpoint.export import export
    from crosstrain.checkpoint.files import Reader
    from crosstrain.checkpoint.folders import find_checkpoint
    from crosstrain.checkpoint.weights import PretrainedWeights
    from crosstrain.engine.precision import DTYPES
    from crosstrain.inference.open_checkpoint import outline, saved_config

    limit = read_bytes(arguments.max_shard_size, "--max-shard-size")
    dtype = DTYPES[arguments.dtype] if arguments.dtype else None
    checkpoint = find_checkpoint(Path(arguments.checkpoint))
    model = None  # for a checkpoint that does not describe its model and has no frozen parameters
    if Reader.open(checkpoint).frozen or isinstance(load_state(checkpoint).get("config"), dict):
        # Without weights: it knows the sources of frozen parameters, and which ones are merged.
        model = outline(saved_config(checkpoint, arguments.options, arguments.trust_data), checkpoint)
    exported = export(
        checkpoint, Path(arguments.output), dtype, limit, lambda line: print(line, flush=True),
        None if model is None else PretrainedWeights.of(model), None if model is None else model.merges(),
    )  # fmt: skip
    opens = exported.architecture  # None: transformers has no such model
    print(
        f"{arguments.output}: {exported.parameters:,} parameters of {checkpoint}, {exported.bytes / 1e6:,.1f} MB in "
        f"{exported.files} file(s)"
        + (f"; open it with transformers' {opens}.from_pretrained({arguments.output!r})" if opens else "")
    )
    return 0
