"""Images with captions, questions or conversations in WebDataset shards."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from annotated_types import Interval
from torch.utils.data import get_worker_info

from crosstrain import (
    SPLITS,
    Annotation,
    DataError,
    EmptySplit,
    FilePath,
    ImageDataset,
    ImageDatasetOptions,
    OptionError,
    PositiveInt,
    Processors,
    ReadContext,
    Sample,
    SampleError,
    Split,
    Text,
    log,
    open_image,
    processors,
    registry,
)
from crosstrain.utils.files import cache_folder

from .annotations import annotation_of, keys_of
from .row_audit import RowAudit
from .streaming import ShardStream
from .webdataset import TEXTS, Shards, check_there, expand, prepare

IMAGES = ("jpg", "jpeg", "png", "webp", "bmp", "gif", "ppm")


@registry.register_dataset("image_text")
class ImageText(ImageDataset):
    """Samples in tar shards: KEY.jpg, or KEY.0.jpg, KEY.1.jpg, ..., with KEY.json, KEY.txt (a caption) or both.

    Samples are read by index, so the platform shuffles them and resumes exactly. A streamed train split is the
    exception: see `ShardStream`.
    """

    @dataclass(kw_only=True)
    class Options(ImageDatasetOptions):
        """Shard names, with braces or wildcards: local, http(s):// or pipe:COMMAND."""

        vis_processor: Processors = field(default_factory=lambda: processors("image_train", "image_eval"))
        text_processor: Processors = field(default_factory=lambda: processors("captions", "captions"))
        train: Text | list[Text] | None = None  # shards to train on, such as data/laion/{00000..00099}.tar
        val: Text | list[Text] | None = None  # shards of the val split; None: no val split
        test: Text | list[Text] | None = None  # shards of the test split; None: no test split
        # folder for indexes and for copies of remote shards; None: $XDG_CACHE_HOME/crosstrain
        cache: FilePath | None = None
        streaming: bool = False  # stream the train split: no index, no copy, no exact resume
        samples: PositiveInt | None = None  # samples per epoch; only for streaming, and required there
        # number of samples in the shuffle buffer of a stream, with images still compressed
        shuffle_buffer: Annotated[int, Interval(ge=1, le=10**7)] = 1000

        def __post_init__(self) -> None:
            if self.streaming and self.samples is None:
                raise OptionError("samples", "say with streaming how many samples are an epoch, which nobody counts")

    options: Options

    @classmethod
    def named_splits(cls, options: Any) -> list[Split]:
        return [split for split, shards in (("val", options.val), ("test", options.test)) if shards]

    @classmethod
    def prepare(cls, options: Any) -> None:
        """Fetch and index the shards of every split."""
        for split in SPLITS:
            names = cls.shards(options, split)
            if cls.streams(options, split):
                check_there(names)
            elif names:
                prepare(names, cls.cache(options), _keys)

    @classmethod
    def shards(cls, options: Any, split: Split) -> list[str]:
        """Return the names of a split's shards."""
        named = getattr(options, split)
        return expand(named) if named else []

    @classmethod
    def streams(cls, options: Any, split: Split) -> bool:
        """Return True if a split is streamed."""
        return options.streaming and split == "train"

    @classmethod
    def cache(cls, options: Any) -> Path:
        """Return the folder for indexes and for copies of remote shards."""
        return Path(options.cache).expanduser() if options.cache else cache_folder("shards")

    def __init__(self, options: Any, split: Split) -> None:
        super().__init__(options, split)
        names = self.shards(options, split)
        if not names:
            raise EmptySplit(f"the {split} split has no shards", f"name them under `{split}` of the dataset")
        self.names, self.context = names, ReadContext(0, 0, 0, 1)
        self.indexed = not self.streams(options, split)
        used = self.used(options, split)
        self.samples = Shards(names, self.cache(options), used) if self.indexed else None
        self.audit = RowAudit(used) if self.samples is None else self.samples.audit
        self.notice = "; ".join(self.audit.notices()) if used else ""
        self._stream: Iterator[tuple[str, dict[str, bytes]]] | None = None
        if not len(self):
            raise EmptySplit(f"the {split} split has no sample: its {len(names)} shards are empty")

    def __len__(self) -> int:
        return self.options.samples or 0 if self.samples is None else len(self.samples)

    def begin(self, context: ReadContext) -> None:
        self.context, self._stream = context, None

    def get(self, index: int, rng: np.random.Generator) -> Sample:
        return super().get(index, rng) if self.samples is not None else self._next(rng)

    def _next(self, rng: np.random.Generator) -> Sample:
        """Return the next usable sample of the stream."""
        if self._stream is None:  # opened on first use, in the worker process that reads it
            info = get_worker_info()
            worker, workers = (info.id, info.num_workers) if info else (0, 1)
            given = (self.context, worker, workers, self.options.shuffle_buffer, self.options.max_skipped)
            self._stream = iter(ShardStream(self.names, *given))
        while True:
            self.tried += 1
            try:
                name, content = next(self._stream)
                images, annotation = _parsed(name, content)
                self._account(name, annotation)
                return self.sample(images, annotation, rng)
            except SampleError as error:
                self.skip(self.tried, str(error))

    def _account(self, name: str, annotation: Annotation) -> None:
        """Count the unused keys of a streamed sample, and log a warning for new ones."""
        before = len(self.audit.plain["unread"])
        self.audit.row(name, keys_of(annotation) if self.audit.ignore_columns else [])
        if len(self.audit.plain["unread"]) > before:
            log.warning("%s: %s", self._name(), self.audit.notices()[0])

    def location(self, index: int) -> str:
        return "" if self.samples is None else self.samples.name(index)

    def read(self, index: int) -> tuple[list[Any], Annotation]:
        if self.samples is None:
            raise DataError(f"the {self.split} split is streamed and has no sample {index}: set streaming=false")
        return _parsed(*self.samples.read(index))


def _keys(name: str, content: dict[str, bytes]) -> list[str]:
    try:
        return keys_of(_annotation(name, content))
    except SampleError:  # reported when the sample is read
        return []


def _parsed(name: str, content: dict[str, bytes]) -> tuple[list[Any], Annotation]:
    """Return the images and the annotation of a sample in a shard."""
    pictures = sorted((e for e in content if e.rpartition(".")[2] in IMAGES), key=_number)
    annotation = _annotation(name, content)
    if not pictures and not annotation.get("text_only"):
        raise SampleError(f"{name} has no image")
    return [open_image(content[e], f"{name}.{e}") for e in pictures], annotation


def _number(extension: str) -> tuple[int, str]:
    """Return a key that sorts a sample's images numerically: 0.jpg, 1.jpg, ..., 10.jpg."""
    number = extension.partition(".")[0]
    return (int(number) if number.isdecimal() else -1, extension)


def _annotation(name: str, content: dict[str, bytes]) -> dict[str, Any]:
    """Return a sample's annotation: its .json object, with the .txt as caption if the object has no caption.

    If the .txt differs from the object's caption, it is returned under `txt`. Unread keys, and the extensions of other
    members, are returned as keys too, so that they are reported.
    """
    described, texts, others = list[str](), list[str](), list[str]()
    for extension in content:
        kind = extension.rpartition(".")[2]
        held = described if kind == "json" else texts if kind in TEXTS else others
        held += [extension] if kind not in IMAGES else []
    if len(described) > 1 or len(texts) > 1 or not described + texts:
        raise SampleError(f"{name} has neither a .json object nor a .txt, or several ({', '.join(content)})")
    try:
        entry = json.loads(content[described[0]]) if described else {}
        caption = content[texts[0]].decode("utf-8-sig").strip() if texts else ""
    except (ValueError, RecursionError) as error:
        raise SampleError(f"{name}: its text cannot be read ({error})") from None
    annotation, unread = annotation_of(entry, beside=True)
    annotation |= dict.fromkeys((*unread, *others), "not read")
    if caption and not annotation.get("caption"):
        annotation["caption"] = caption
    elif caption and caption != annotation["caption"]:
        annotation["txt"] = caption
    return annotation
