"""Images with captions, questions or conversations in WebDataset shards."""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from crosstrain import (
    SPLITS,
    Annotation,
    EmptySplit,
    FilePath,
    ImageDataset,
    ImageDatasetOptions,
    Processors,
    SampleError,
    Split,
    Text,
    cache_folder,
    open_image,
    os_errors_as,
    processors,
    registry,
)

from ..commands.prepare import io
from ..commands.prepare.shards import file_state
from .annotations import annotation_of, keys_of
from .webdataset import TEXTS, Shards, expand, prepare

IMAGES = ("jpg", "jpeg", "png", "webp", "bmp", "gif", "ppm")


@registry.register_dataset("image_text")
class ImageText(ImageDataset):
    """Samples in tar shards: KEY.jpg, or KEY.0.jpg, KEY.1.jpg, ..., with KEY.json, KEY.txt (a caption) or both.

    Samples are read by index, so the platform can shuffle them and resume exactly.
    """

    @dataclass(kw_only=True)
    class Options(ImageDatasetOptions):
        """Names of shards: local paths, URLs or pipe:COMMAND, with braces or wildcards."""

        elsewhere: ClassVar = {
            "streaming": "none: shards are read by index, and remote ones are copied into `cache` once",
            "prepare": "none: `instructions` reads images and JSON files; webdataset's ShardWriter makes shards",
        }
        former: ClassVar = {"streaming": False, "samples": None, "shuffle_buffer": 1000, "prepare": None}

        vis_processor: Processors = field(default_factory=lambda: processors("image_train", "image_eval"))
        text_processor: Processors = field(default_factory=lambda: processors("captions", "captions"))
        train: Text | list[Text] | None = None  # shards to train on, such as data/laion/{00000..00099}.tar
        val: Text | list[Text] | None = None  # shards of the val split; None: no val split
        test: Text | list[Text] | None = None  # shards of the test split; None: no test split
        # folder for indexes and for copies of remote shards; None: $XDG_CACHE_HOME/crosstrain
        cache: FilePath | None = None

    options: Options

    @classmethod
    def named_splits(cls, options: Any) -> list[Split]:
        return [split for split, shards in (("val", options.val), ("test", options.test)) if shards]

    @classmethod
    def prepare(cls, options: Any) -> None:
        """Fetch and index the shards of every split."""
        for split in SPLITS:
            prepare(cls.shards(options, split), cls.cache(options), _keys)

    @classmethod
    def shards(cls, options: Any, split: Split) -> list[str]:
        """Return the names of a split's shards."""
        named = getattr(options, split)
        return expand(named) if named else []

    @classmethod
    def cache(cls, options: Any) -> Path:
        """Return the folder for indexes and for copies of remote shards."""
        return Path(options.cache).expanduser() if options.cache else cache_folder("shards")

    def __init__(self, options: Any, split: Split) -> None:
        super().__init__(options, split)
        names = self.shards(options, split)
        if not names:
            raise EmptySplit(f"the {split} split has no shards", f"name them under `{split}` of the dataset")
        used = self.used(options, split)
        self.samples = Shards(names, self.cache(options), used)
        self.notice = "; ".join(self.samples.audit.notices()) if used else ""
        if not len(self):
            raise EmptySplit(f"the {split} split has no sample: its {len(names)} shards are empty")

    def __len__(self) -> int:
        return len(self.samples)

    def state(self) -> list[Any]:
        shards = [Path(name).expanduser() for name in self.shards(self.options, self.split)]
        return [*super().state(), [file_state(shard) for shard in shards if shard.exists()]]

    def location(self, index: int) -> str:
        return self.samples.name(index)

    def read(self, index: int) -> tuple[list[Any], Annotation]:
        name, content = self.samples.read(index)
        pictures = sorted((e for e in content if e.rpartition(".")[2] in IMAGES), key=_number)
        annotation = _annotation(name, content)
        if not pictures and not annotation.get("text_only"):
            raise SampleError(f"{name} has no image")
        return [open_image(content[e], f"{name}.{e}") for e in pictures], annotation


def _keys(name: str, content: dict[str, bytes]) -> list[str]:
    try:
        return keys_of(_annotation(name, content))
    except SampleError:  # the error is reported when the sample is read
        return []


def _number(extension: str) -> list[str | int]:
    """Return a key that sorts a sample's images by their numbers: jpg, 0.jpg, 1.jpg, ..., 10.jpg, page_2.jpg."""
    return [int(part) if i % 2 else part for i, part in enumerate(re.split(r"(\d+)", extension.rpartition(".")[0]))]


def _annotation(name: str, content: dict[str, bytes]) -> dict[str, Any]:
    """Return a sample's annotation: its .json object, with the .txt as caption if the object has no caption.

    A .txt that differs from the object's caption is returned under `txt`. Unread keys, and the extensions of other
    members, are returned as keys too, so that they are reported.
    """
    kinds = {extension: extension.rpartition(".")[2] for extension in content}
    described = [extension for extension, kind in kinds.items() if kind == "json"]
    texts = [extension for extension, kind in kinds.items() if kind in TEXTS and kind != "json"]
    others = [extension for extension, kind in kinds.items() if kind not in (*TEXTS, *IMAGES)]
    if len(described) > 1 or len(texts) > 1 or not described + texts:
        raise SampleError(f"{name}: expected one .json object, one .txt or one of each, got {', '.join(content)}")
    with os_errors_as(SampleError, f"{name}: its text cannot be read", ValueError, RecursionError):
        entry = io.parsed(content[described[0]]) if described else {}
        caption = content[texts[0]].decode("utf-8-sig").strip() if texts else ""
    annotation, unread = annotation_of(entry, beside=True)
    annotation |= dict.fromkeys((*unread, *others), "not read")
    if caption and not annotation.get("caption"):
        annotation["caption"] = caption
    elif caption and caption != annotation["caption"]:
        annotation["txt"] = caption
    return annotation
