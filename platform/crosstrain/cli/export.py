"""`crosstrain export`: a checkpoint as a plain Hugging Face model folder."""

from __future__ import annotations

import argparse
from pathlib import Path

from crosstrain.checkpoint import folders
from crosstrain.checkpoint.checkpointer import load_state
from crosstrain.checkpoint.export import export as write
from crosstrain.checkpoint.files import Reader
from crosstrain.checkpoint.frozen import Base
from crosstrain.engine.precision import DTYPES
from crosstrain.inference.open_checkpoint import outline, saved_config
from crosstrain.modeling.base import Model
from crosstrain.utils.units import read_bytes


def export(arguments: argparse.Namespace) -> int:
    """Write `arguments.checkpoint` to `arguments.output`; returns the exit code."""
    limit = read_bytes(arguments.max_shard_size, "--max-shard-size")
    dtype = DTYPES[arguments.dtype] if arguments.dtype else None
    checkpoint = folders.find_checkpoint(Path(arguments.checkpoint))
    model = _model(checkpoint, arguments.options, arguments.trust_data)
    exported = write(
        checkpoint,
        Path(arguments.output),
        dtype,
        limit,
        lambda line: print(line, flush=True),
        None if model is None else Base.of(model),
        None if model is None else model.merges(),
    )
    opens = exported.architecture  # None: transformers has no such model
    print(
        f"{arguments.output}: {exported.parameters:,} parameters of {checkpoint}, {exported.bytes / 1e6:,.1f} MB in "
        f"{exported.files} file(s)"
        + (f"; open it with transformers' {opens}.from_pretrained({arguments.output!r})" if opens else "")
    )
    return 0


def _model(checkpoint: Path, options: list[str], trust_data: bool) -> Model | None:
    """The configured model, without weights: it knows where frozen ones come from, and what is merged.

    None for a checkpoint that says nothing about its model and needs none.
    """
    if not Reader.open(checkpoint).frozen and not isinstance(load_state(checkpoint).get("config"), dict):
        return None
    return outline(saved_config(checkpoint, options, trust_data), checkpoint)
