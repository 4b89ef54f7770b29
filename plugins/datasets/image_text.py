"""Images with captions, questions or conversations in WebDataset shards."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from crosstrain.data.conversations import SampleError
from crosstrain.data.dataset import SPLITS, Split
from crosstrain.data.image_dataset import (
    Annotation,
    ImageDataset,
    ImageDatasetOptions,
    Processors,
    open_image,
    processors,
)
from crosstrain.errors import DataError
from crosstrain.registry import registry

from .packing import PackOptions, pack
from .shards import Shards, default_cache, expand, prepare

IMAGES = ("jpg", "jpeg", "png", "webp", "bmp", "gif", "ppm")


@registry.register_dataset("image_text")
class ImageText(ImageDataset):
    """Samples in tar shards: KEY.jpg or several KEY.0.jpg, KEY.1.jpg, ..., with KEY.json, or KEY.txt for a caption.

    Every sample is reachable by its index, so the order is the platform's own and resuming is seeking.
    """

    @dataclass(kw_only=True)
    class Options(ImageDatasetOptions):
        """Where the shards are: names with braces or wildcards, local, http(s):// or pipe:COMMAND."""

        vis_processor: Processors = field(default_factory=lambda: processors("image_train", "image_eval"))
        text_processor: Processors = field(default_factory=lambda: processors("captions", "captions"))
        train: str | list[str] | None = None  # such as data/laion/{00000..00099}.tar
        val: str | list[str] | None = None
        test: str | list[str] | None = None
        cache: str | None = None  # folder of indexes and copies of remote shards; None: $XDG_CACHE_HOME/crosstrain
        prepare: PackOptions | None = None  # how to make the shards when there are none

    options: Options

    @classmethod
    def prepare(cls, options: Any) -> None:
        """Pack what is to be packed; fetch and index the shards of every split that is named."""
        if options.prepare is not None:
            pack(options.prepare)
        for split in SPLITS:
            if cls.shards(options, split):
                prepare(cls.shards(options, split), cls.cache(options))

    @classmethod
    def shards(cls, options: Any, split: Split) -> list[str]:
        """Names of a split's shards."""
        named = getattr(options, split)
        return expand(named) if named else []

    @classmethod
    def cache(cls, options: Any) -> Path:
        return Path(options.cache).expanduser() if options.cache else default_cache()

    def __init__(self, options: Any, split: Split) -> None:
        super().__init__(options, split)
        names = self.shards(options, split)
        if not names:
            raise DataError(f"the {split} split has no shards: name them under `{split}` of the dataset")
        self.samples = Shards(names, self.cache(options))
        if not len(self):
            raise DataError(f"the {split} split has no sample: its {len(names)} shards are empty")

    def __len__(self) -> int:
        return len(self.samples)

    def read(self, index: int) -> tuple[list[Any], Annotation]:
        name, content = self.samples.read(index)
        pictures = sorted((e for e in content if e.rpartition(".")[2] in IMAGES), key=_number)
        annotation = _annotation(name, content)
        if not pictures and not annotation.get("text_only"):
            raise SampleError(f"{name} has no image")
        return [open_image(content[e], f"{name}.{e}") for e in pictures], annotation


def _number(extension: str) -> tuple[int, str]:
    """Order of several images of a sample: 0.jpg, 1.jpg, ..., 10.jpg."""
    number = extension.partition(".")[0]
    return (int(number) if number.isdecimal() else -1, extension)


def _annotation(name: str, content: dict[str, bytes]) -> Annotation:
    try:
        if "json" in content:
            found = json.loads(content["json"])
            if isinstance(found, dict):
                return found
        elif "txt" in content:
            return {"caption": content["txt"].decode().strip()}
    except ValueError as error:
        raise SampleError(f"{name}: its text cannot be read ({error})") from None
    raise SampleError(f"{name} has neither a .json object nor a .txt")
