"""`crosstrain export`: a checkpoint as a plain Hugging Face model folder."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from crosstrain.checkpoint import folders
from crosstrain.checkpoint.export import export as write
from crosstrain.errors import UserError
from crosstrain.precision import DTYPES

_UNITS = {
    "": 1,
    **{f"{p}B": 1000**i for i, p in enumerate("KMGT", 1)},
    **{f"{p}IB": 1024**i for i, p in enumerate("KMGT", 1)},
}


def export(arguments: argparse.Namespace) -> int:
    """Write `arguments.checkpoint` to `arguments.output`; returns the exit code."""
    limit = _bytes(arguments.max_shard_size)
    dtype = DTYPES[arguments.dtype] if arguments.dtype else None
    checkpoint = folders.find_checkpoint(Path(arguments.checkpoint))
    exported = write(checkpoint, Path(arguments.output), dtype, limit, lambda line: print(line, flush=True))
    print(
        f"{arguments.output}: {exported.parameters:,} parameters of {checkpoint}, {exported.bytes / 1e6:,.1f} MB in "
        f"{exported.files} file(s); open it with transformers' "
        f"{exported.architecture or 'AutoModel'}.from_pretrained({arguments.output!r})"
    )
    return 0


def _bytes(size: str) -> int:
    """A size such as 5GB (10^9) or 5GiB (2^30); UserError for anything else."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) *([a-z]*)", size.strip(), re.IGNORECASE)
    if not match or match[2].upper() not in _UNITS or float(match[1]) <= 0:
        raise UserError(f"--max-shard-size: {size!r} is not a size such as 5GB or 500MiB")
    return int(float(match[1]) * _UNITS[match[2].upper()])
