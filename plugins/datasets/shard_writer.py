"""Pack a folder of images and a JSON file of annotations into WebDataset shards."""

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Interval
from webdataset import ShardWriter

from crosstrain import DataError, FilePath, OptionError, PositiveInt, SampleError, log
from crosstrain.utils.files import write_json

from ..commands.prepare.prepare import new_folder, output_lock
from .annotations import read_annotations, read_image
from .row_audit import RowAudit

Packed = Iterable[dict[str, Any]]  # samples for ShardWriter: __key__ -> name, extension -> bytes


@dataclass
class PackOptions:
    """Images and annotations to pack, and the output folder."""

    images: FilePath  # folder of the images; names in annotations are relative to it
    annotations: FilePath  # JSON file in the layout of LLaVA or MiniGPT-4
    output: FilePath  # folder for train-NNNNNN.tar, val-NNNNNN.tar and test-NNNNNN.tar
    val: Annotated[float, Interval(ge=0, lt=1)] = 0.0  # fraction of the samples for val, taken from the start
    test: Annotated[float, Interval(ge=0, lt=1)] = 0.0  # fraction of the samples for test, taken after those of val
    samples_per_shard: PositiveInt = 10_000  # samples per .tar file

    def __post_init__(self) -> None:
        if self.val + self.test >= 1:
            raise OptionError("val", f"{self.val} and test, {self.test}, leave nothing to train on")


def pack(options: PackOptions) -> None:
    """Write the shards unless they exist.

    Raises DataError if an image is missing, or if the existing shards were made with different options.
    """

    def splits() -> Iterator[tuple[str, Packed]]:
        audit = RowAudit()
        entries = [entry for _, entry in read_annotations(Path(options.annotations), audit)]
        for notice in audit.notices():
            log.warning("%s: %s", options.annotations, notice)
        val, test = (round(share * len(entries)) for share in (options.val, options.test))
        bounds = {"val": (0, val), "test": (val, val + test), "train": (val + test, len(entries))}
        for split, (start, stop) in bounds.items():
            yield split, (_sample(i, entries[i], Path(options.images)) for i in range(start, stop))

    write_once(Path(options.output), asdict(options), splits, options.samples_per_shard)


def _sample(number: int, entry: dict[str, Any], folder: Path) -> dict[str, Any]:
    sample: dict[str, Any] = {"__key__": f"{number:08d}"}
    names = entry.get("images", [])
    for i, name in enumerate(names):
        extension = Path(name).suffix.lower().removeprefix(".") or "jpg"
        try:
            sample[f"{i}.{extension}" if len(names) > 1 else extension] = read_image(name, folder)
        except SampleError as error:
            raise DataError(str(error)) from None
    annotation = {key: value for key, value in entry.items() if key != "images"}
    sample["json"] = json.dumps(annotation if names else annotation | {"text_only": True}).encode()
    return sample


def write_once(
    output: Path,
    made: dict[str, Any],
    splits: Callable[[], Iterable[tuple[str, Packed]]],
    per_shard: int,
    beside: Callable[[Path], None] = lambda folder: None,
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
