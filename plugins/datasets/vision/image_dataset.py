"""The base class of datasets of images with text: it handles processors, tokenizer, bad samples and prompts."""

from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol

import numpy as np
import torch
from annotated_types import Interval

from crosstrain import (
    Batch,
    Component,
    Conversation,
    DataError,
    Dataset,
    FilePath,
    PositiveInt,
    PromptBuilder,
    Sample,
    SampleError,
    Split,
    Text,
    UserError,
    load_tokenizer,
    log,
    registry,
)
from crosstrain.data.chat import EncodeText
from crosstrain.data.tokenizer import load_cached

from .conversations import IMAGE, ConversationEncoder, Style, check_images, collate

_TRIED = 1000  # `max_skipped` is a share of at least this many samples, or of the whole split if that is smaller

Annotation = Mapping[str, Any]  # the texts of a sample: a caption, questions, conversations


class ImageProcessor(Protocol):
    """A processor of images for a vision encoder."""

    def __call__(self, image: Any, rng: np.random.Generator) -> np.ndarray:
        """Convert a PIL image to fp32 [3, height, width]. `rng` is the only allowed source of randomness."""


class TextProcessor(Protocol):
    """A processor that turns annotations into conversations about images."""

    style: Style
    # Annotation keys that the processor reads: KEY, or KEY.NAME for a key of objects in a list. Other keys are
    # reported as unused. Without `keys`, nothing is reported.
    keys: Collection[str]

    def __call__(self, annotation: Annotation, images: int, rng: np.random.Generator) -> list[Conversation]:
        """Return the conversations to train on. Raises SampleError if there is no conversation.

        images: number of images of the sample.
        """

    def questions(self, annotation: Annotation, images: int) -> list[tuple[Conversation, str, str]]:
        """Return (conversation up to the answer, answer, kind of question) for every question."""

    def asked(self, conversation: Conversation) -> Conversation:
        """Format a chat as in training, for example with the system prompt. By default, the chat is unchanged."""
        return conversation


@dataclass
class Processors:
    """The processors of the train split and of the other splits."""

    train: Annotated[Component, "processor"]  # processor of the train split
    eval: Annotated[Component, "processor"]  # processor of the other splits


def processors(train: str, evaluate: str, **options: Any) -> Processors:
    """Return the processors with the given names and the same options, for use as a default."""
    return Processors(Component(train, options or None), Component(evaluate, options or None))


@dataclass(frozen=True)
class Example:
    """A question with a known answer. `prompt` is a sample without labels. Scores are grouped by `kind`."""

    prompt: Sample
    question: str
    answer: str
    kind: str
    picture: Any = None  # a PIL image to show


class ImagePrompts(PromptBuilder):
    """A builder of prompts from conversations about images, formatted like a dataset's evaluation splits."""

    def __init__(
        self,
        image_processor: ImageProcessor,
        encoder: ConversationEncoder,
        asked: Callable[[Conversation], Conversation] = list,
    ) -> None:
        self.image_processor, self.encoder, self.asked = image_processor, encoder, asked
        self.end_id = encoder.end_id

    def ask(self, conversation: Conversation, files: list[Any]) -> Sample:
        try:
            check_images(conversation, len(files))
        except SampleError as error:
            raise UserError(str(error)) from None
        rng = np.random.default_rng(0)
        pixels = np.stack([self.image_processor(image, rng) for image in files]) if files else None
        return self.encoder.prompt(self.asked(conversation), pixels)

    def open(self, file: str) -> Any:
        """Return the image in a file as a PIL image."""
        from .image import open_image_file

        try:
            return open_image_file(Path(file))
        except SampleError as error:
            raise UserError(f"--image: {error}") from None

    def placed(self, text: str, files: int) -> str:
        return text if text.count(IMAGE) == files else IMAGE * files + text.replace(IMAGE, "")


class VqaDataset(Dataset):
    """A dataset with questions and prompts about images, for `evaluate --answers` and for chats."""

    image_sizes: frozenset[tuple[int, int]] = frozenset()  # (height, width) of images; the model must use the same size

    @abstractmethod
    def examples(self, index: int) -> list[Example]:
        """Return questions with known answers about sample `index`."""


@dataclass(kw_only=True)
class ImageDatasetOptions:
    """Options of every dataset of images with text."""

    # tokenizer of the language model: a Hugging Face name, a folder or a tokenizer.json; required
    tokenizer: FilePath | None = None
    # embeddings per image: the model's num_query_tokens
    image_tokens: Annotated[int, Interval(ge=1, le=2**16)] = 32
    vis_processor: Processors  # processors of images
    text_processor: Processors  # processors that make conversations from annotations
    max_length: PositiveInt | None = None  # maximum tokens per sample; None: no limit
    too_long: Literal["skip", "truncate", "error"] = "skip"  # skip longer samples, truncate them, or raise an error
    # maximum share of skipped samples among the samples that a process has read; until it has read 1000, the share is
    # relative to 1000 samples, or to the whole split if that is smaller
    max_skipped: Annotated[float, Interval(ge=0, lt=1)] = 0.01
    # keys of annotations that are not reported as unused; a key includes all keys below it
    ignore_columns: list[Text] = field(default_factory=list)
    blind: bool = False  # replace all images with zeros, to measure the contribution of the text


class ImageDataset(VqaDataset):
    """A dataset of samples with images and an annotation. Subclasses read the samples.

    A sample that cannot be used is replaced with the next usable sample; the replacement is the same in every run.
    `skipped` maps the index of each replaced sample to the reason. Raises DataError if the share of skipped samples
    exceeds `max_skipped`. Each process counts its own samples.
    """

    options: Any

    def __init__(self, options: Any, split: Split) -> None:
        super().__init__(options, split)
        if options.tokenizer is None:
            raise DataError("tokenizer is missing: set it to the language model's tokenizer")
        tokenizer, self.tokenizer_path = load_cached(options.tokenizer)
        self.vocab_size = tokenizer.vocab_size
        self.sequence_length = options.max_length
        self.image_processor: ImageProcessor = _processor(_of_split(options.vis_processor, split))
        self.text_processor: TextProcessor = _processor(_of_split(options.text_processor, split))
        self.encoder = ConversationEncoder(tokenizer, options.image_tokens, self.text_processor.style)
        self.skipped: dict[int, str] = {}
        self.tried = 0

    @classmethod
    def shapes(cls, options: Any) -> Batch | None:
        """Return the shapes of a batch with one image; None if `max_length` is not set."""
        if options.max_length is None:
            return None
        pixels = _blank(_processor(options.vis_processor.eval))
        ids = torch.zeros(1, options.max_length, dtype=torch.int64, device="meta")
        return {"input_ids": ids, "labels": ids, "pixel_values": torch.empty(1, *pixels.shape, device="meta")}

    @property
    def image_sizes(self) -> frozenset[tuple[int, int]]:  # type: ignore[override]
        height, width = _blank(self.image_processor).shape[-2:]
        return frozenset({(height, width)})

    @classmethod
    def used(cls, options: Any, split: Split) -> frozenset[str]:
        """Return the annotation keys that are not reported as unused; empty if the processor declares no keys."""
        keys = getattr(_processor(_of_split(options.text_processor, split)), "keys", ())
        return frozenset(("images", "text_only", *keys, *options.ignore_columns) if keys else ())

    @abstractmethod
    def read(self, index: int) -> tuple[list[Any], Annotation]:
        """Return a sample's PIL images and annotation. Raises SampleError if the sample cannot be read."""

    def get(self, index: int, rng: np.random.Generator) -> Sample:
        for candidate in chain(range(index, len(self)), range(index)):
            if candidate in self.skipped:
                continue
            try:
                self.tried += 1
                return self.sample(*self.read(candidate), rng)
            except SampleError as error:
                self.skip(candidate, str(error))
        raise AssertionError("skip() raises before all samples are skipped")

    def sample(self, images: list[Any], annotation: Annotation, rng: np.random.Generator) -> Sample:
        """Make a sample from images and an annotation. Raises SampleError if the sample cannot be used."""
        conversations = self.text_processor(annotation, len(images), rng)
        for conversation in conversations:
            check_images(conversation, len(images))
        sample = self._fit(self.encoder.sample(conversations))
        if images:
            sample["pixel_values"] = self._pixels(images, rng)
        return sample

    def _pixels(self, images: list[Any], rng: np.random.Generator) -> np.ndarray:
        """Process images into fp32 [images, 3, height, width]."""
        made = [self.image_processor(image, rng) for image in images]
        pixels = np.stack(made) if len(made) > 1 else made[0][None]  # one image needs no copy
        return np.zeros_like(pixels) if self.options.blind else pixels

    def _fit(self, sample: Sample) -> Sample:
        limit, length = self.options.max_length, len(sample["input_ids"])
        if limit is None or length <= limit:
            return sample
        reason = f"it has {length} tokens, and max_length is {limit}"
        if self.options.too_long == "error":
            raise DataError(
                f"{self._name()}: a sample is too long: {reason}; raise max_length, or set too_long to skip or truncate"
            )
        cut = {key: value[:limit] for key, value in sample.items()}
        if self.options.too_long == "skip" or (cut["labels"] < 0).all() or (sample["input_ids"][limit:] < 0).any():
            raise SampleError(reason)  # also raised if no target would remain, or an image would be cut
        return cut

    def skip(self, index: int, reason: str) -> None:
        """Record a sample that cannot be used. Raises DataError if too many samples are skipped."""
        self.skipped[index] = reason
        log.warning("%s: sample %d is skipped: %s (%d so far)", self._name(), index, reason, len(self.skipped))
        among = max(self.tried, min(len(self), _TRIED))
        if len(self.skipped) > self.options.max_skipped * among:
            raise DataError(
                f"{self._name()}: {len(self.skipped)} of {among} samples cannot be used, which is more than "
                f"max_skipped={self.options.max_skipped}; the last one: {reason}"
            )

    def _name(self) -> str:
        return f"{self.address or type(self).__name__}, {self.split} split"

    def collate(self, samples: list[Sample]) -> Batch:
        return collate(samples)

    def examples(self, index: int) -> list[Example]:
        try:
            self.tried += 1
            images, annotation = self.read(index)
            asked = self.text_processor.questions(annotation, len(images))
        except SampleError as error:
            self.skip(index, str(error))
            return []
        pixels = self._pixels(images, np.random.default_rng(0)) if images else None
        picture = images[0] if images else None
        return [Example(self.encoder.prompt(c, pixels), c[-1].text, answer, kind, picture) for c, answer, kind in asked]

    @classmethod
    def prompt_builder(cls, options: Any, tokenizer: Path, encode: EncodeText | None = None) -> PromptBuilder:
        text: TextProcessor = _processor(options.text_processor.eval)
        encoder = ConversationEncoder(load_tokenizer(tokenizer), options.image_tokens, text.style, encode)
        asked = getattr(text, "asked", list)  # a processor need not define `asked`
        return ImagePrompts(_processor(options.vis_processor.eval), encoder, asked)


def _blank(processor: ImageProcessor) -> np.ndarray:
    """Process a black image. All processed images have the same shape."""
    from PIL import Image

    return processor(Image.new("RGB", (64, 64)), np.random.default_rng(0))


def _of_split(given: Processors, split: Split) -> Component:
    return given.train if split == "train" else given.eval


def _processor(component: Component) -> Any:
    return registry.get("processor", component.name)(component.options)
