"""Instructions about images: JSON files and a folder of images, as LLaVA and MiniGPT-4 publish them."""

from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Interval

from crosstrain import (
    SPLITS,
    Annotation,
    DataError,
    EmptySplit,
    FilePath,
    ImageDataset,
    ImageDatasetOptions,
    OptionError,
    Processors,
    Split,
    open_image_file,
    processors,
    registry,
)

from .annotations import read_annotations


@registry.register_dataset("instructions")
class Instructions(ImageDataset):
    """Conversations of one or several turns; entries without images are text alone."""

    @dataclass(kw_only=True)
    class Options(ImageDatasetOptions):
        """Files and their splits."""

        annotations: FilePath  # a JSON file in the layout of LLaVA, MiniGPT-4 or MiniGPT4Qwen
        images: FilePath  # folder that image names are relative to
        vis_processor: Processors = field(default_factory=lambda: processors("image_train", "image_eval"))
        text_processor: Processors = field(default_factory=lambda: processors("dialogue", "dialogue"))
        val: FilePath | None = None  # annotations of the split, in place of a share of the others
        test: FilePath | None = None  # annotations of the split
        # shares of train, val, test, in file order
        split: list[Annotated[float, Interval(ge=0, le=10**12)]] = field(default_factory=lambda: [1.0, 0.0, 0.0])

        def __post_init__(self) -> None:
            if not 1 <= len(self.split) <= 3 or not sum(self.split):
                raise OptionError("split", f"must be up to three shares such as [95, 5, 0], not {self.split}")

    options: Options

    @classmethod
    def prepare(cls, options: Any) -> None:
        """Read the annotations, so that mistakes in them show before any worker starts."""
        for file in filter(None, (options.annotations, options.val, options.test)):
            _entries(file)

    @classmethod
    def is_prepared(cls, options: Any) -> bool:
        return True

    def __init__(self, options: Any, split: Split) -> None:
        super().__init__(options, split)
        own = getattr(options, split, None)
        self.file = own or options.annotations
        self.entries = _entries(self.file)
        self.folder = Path(options.images).expanduser()
        if not self.folder.is_dir() and any(entry["images"] for entry in self.entries):
            raise DataError(f"there is no folder {options.images} of images")
        k, shares = (0, [1.0]) if own else (SPLITS.index(split), [*options.split, 0.0, 0.0][:3])
        self.start, self.stop = (round(sum(shares[:n]) / sum(shares) * len(self.entries)) for n in (k, k + 1))
        if self.start == self.stop:
            raise EmptySplit(
                f"the {split} split has none of the {len(self.entries)} entries of {self.file}",
                f"change split={options.split}" + (f", or name a file as {split}" if split != "train" else ""),
            )

    def __len__(self) -> int:
        return self.stop - self.start

    def location(self, index: int) -> str:
        return f"entry {self.start + index} of {self.file}"

    def read(self, index: int) -> tuple[list[Any], Annotation]:
        entry = self.entries[self.start + index]
        return [open_image_file(self.folder / name) for name in entry["images"]], entry


def _entries(annotations: str) -> list[dict[str, Any]]:
    path = Path(annotations).expanduser()
    return _read(path, path.stat().st_mtime_ns if path.exists() else 0)


@lru_cache(maxsize=8)
def _read(path: Path, _modified: int) -> list[dict[str, Any]]:
    return list(read_annotations(path))
