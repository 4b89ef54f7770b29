"""Write samples into WebDataset shards, once."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from webdataset import ShardWriter

from crosstrain import DataError
from crosstrain.utils.files import write_json

from ..commands.prepare.prepare import new_folder, output_lock

Packed = Iterable[dict[str, Any]]  # samples for ShardWriter: __key__ -> name, extension -> bytes


def write_once(
    output: Path,
    made: dict[str, Any],
    splits: Callable[[], Iterable[tuple[str, Packed]]],
    per_shard: int,
    beside: Callable[[Path], None],
) -> None:
    """Write SPLIT-NNNNNN.tar files, and dataset.json with `made`, into a new folder that appears atomically.

    `beside` writes more files into the folder. An existing folder is not changed. Raises DataError if the dataset.json
    of an existing folder differs from `made`.
    """
    output = output.expanduser().absolute()
    with output_lock(output, wait=True):
        if output.exists():
            return _check_made(output, made)
        with new_folder(output) as folder:
            beside(folder)
            counts = {}
            for split, samples in splits():
                with ShardWriter(str(folder / f"{split}-%06d.tar"), maxcount=per_shard, verbose=0) as writer:
                    for sample in samples:
                        writer.write(sample)
                counts[split] = writer.total
            write_json(folder / "dataset.json", {"options": made, "samples": counts})


def _check_made(output: Path, made: dict[str, Any]) -> None:
    try:
        there = json.loads((output / "dataset.json").read_text(encoding="utf-8"))["options"]
    except (OSError, ValueError, KeyError):
        raise DataError(f"{output} exists and holds no shards that were packed here: choose another folder") from None
    for key in (key for key, value in made.items() if there.get(key) != value):
        raise DataError(
            f"{output} was made with {key}={there.get(key)!r}, and that is now {made[key]!r}: choose another folder, "
            f"or remove it"
        )
