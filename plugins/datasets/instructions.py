"""Instructions about images: JSON files and a folder of images, as published by LLaVA and MiniGPT-4."""

from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, ClassVar

from annotated_types import Interval

from crosstrain import (
    SPLITS,
    Annotation,
    DataError,
    FilePath,
    ImageDataset,
    ImageDatasetOptions,
    Processors,
    Split,
    SplitOptions,
    open_image,
    processors,
    registry,
)

from .annotations import read_annotations, read_image
from .row_audit import RowAudit

Entry = tuple[str, dict[str, Any]]  # (location, annotation)


@registry.register_dataset("instructions")
class Instructions(ImageDataset):
    """Conversations about images, with one or more turns; entries without images are text only."""

    @dataclass(kw_only=True)
    class Options(ImageDatasetOptions, SplitOptions):
        """Files and their splits."""

        files: ClassVar[str] = "annotations"
        annotations: FilePath  # JSON file in a layout described in docs/vision-language.md
        images: FilePath  # folder that image names are relative to
        val: FilePath | None = None  # annotations of the val split; None: a share of `annotations`
        test: FilePath | None = None  # annotations of the test split; None: a share of `annotations`
        vis_processor: Processors = field(default_factory=lambda: processors("image_train", "image_eval"))
        text_processor: Processors = field(default_factory=lambda: processors("dialogue", "dialogue"))
        max_dropped: Annotated[float, Interval(ge=0, lt=1)] = 0.1  # maximum fraction of dropped rows; more is an error

    options: Options

    @classmethod
    def prepare(cls, options: Any) -> None:
        """Read the annotations, so that errors in them are raised before any worker starts."""
        for split in SPLITS:
            cls._entries(options, split)

    @classmethod
    def is_prepared(cls, options: Any) -> bool:
        return True

    def __init__(self, options: Any, split: Split) -> None:
        super().__init__(options, split)
        self.entries, self.notice = self._entries(options, split)
        self.folder = Path(options.images).expanduser()
        if not self.folder.is_dir() and any(entry["images"] for _, entry in self.entries):
            raise DataError(f"the image folder {options.images} does not exist")
        source = f"entries of {options.of(split)[0].annotations}"
        self.entries = [self.entries[number] for number in options.rows(split, len(self.entries), source)]

    def __len__(self) -> int:
        return len(self.entries)

    def location(self, index: int) -> str:
        return self.entries[index][0]

    def read(self, index: int) -> tuple[list[Any], Annotation]:
        place, entry = self.entries[index]
        return [self._opened(name, place) for name in entry["images"]], entry

    def _opened(self, name: str | list[str], place: str) -> Any:
        """Return an image, or the frames of a video."""
        if isinstance(name, list):
            return [self._opened(frame, place) for frame in name]
        return open_image(read_image(name, self.folder), f"{place}: {name[:100]}")

    @classmethod
    def _entries(cls, options: Any, split: Split) -> tuple[list[Entry], str]:
        """Return a split's entries with their locations, and a notice about unused keys and dropped entries."""
        path = Path(options.of(split)[0].annotations).expanduser()
        modified = path.stat().st_mtime_ns if path.exists() else 0
        return _read(path, modified, cls.used(options, split), options.max_dropped)


@lru_cache(maxsize=8)
def _read(path: Path, _modified: int, used: frozenset[str], max_dropped: float) -> tuple[list[Entry], str]:
    audit = RowAudit(used)
    return list(read_annotations(path, audit, max_dropped)), "; ".join(audit.notices())
