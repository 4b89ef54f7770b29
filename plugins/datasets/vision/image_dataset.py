"""The base class of datasets of images with text: processors, tokenizer, bad samples, prompts and packing."""

from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol

import numpy as np
import torch
from annotated_types import Interval
from torch.utils.data import DataLoader

from crosstrain import (
    Batch,
    Component,
    Conversation,
    DataError,
    Dataset,
    EncodeText,
    FilePath,
    PositiveFloat,
    PositiveInt,
    PromptBuilder,
    Sample,
    SampleError,
    Split,
    Text,
    UserError,
    cache_folder,
    log,
    registry,
    replacing,
)
from crosstrain.data.tokenizer import load_cached
from crosstrain.utils.forks import CheckedForkContext

from ...commands.prepare.pool import cores
from ...commands.prepare.prepare import output_lock
from ...commands.prepare.shards import file_state, key_of
from ..packing import pack
from .conversations import IMAGE, ConversationEncoder, Style, check_images
from .processor_encoder import ProcessorEncoder, joined

_FORMAT = 1  # version of the files of lengths; changing it measures again
_MANY = 1000  # samples; with fewer, starting processes takes longer than the work
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

    def questions(self, annotation: Annotation, images: int) -> list[tuple[Conversation, str | list[str], str]]:
        """Return (conversation up to the answer, answer, kind of question) for every question.

        The answer is a text, or a list of reference answers.
        """

    def asked(self, conversation: Conversation) -> Conversation:
        """Format a chat as in training, for example with the system prompt. By default, the chat is unchanged."""
        return conversation


Encoder = ConversationEncoder | ProcessorEncoder  # turns conversations and their images into samples


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
    answers: tuple[str, ...] = ()  # all reference answers; `answer` is the most frequent one


class ImagePrompts(PromptBuilder):
    """A builder of prompts from conversations about images, formatted like a dataset's evaluation splits."""

    def __init__(self, encoder: Encoder, asked: Callable[[Conversation], Conversation] = list) -> None:
        self.encoder, self.asked = encoder, asked
        self.end_id = encoder.end_id

    def ask(self, conversation: Conversation, files: list[Any]) -> Sample:
        try:
            check_images(conversation, len(files))
            seen: Any = self.encoder.process(files, np.random.default_rng(0))
            return self.encoder.prompt(self.asked(conversation), seen)
        except SampleError as error:
            raise UserError(str(error)) from None

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

    # the model's processor in transformers, for arch: image_text: a Hugging Face name or a folder; it replaces
    # tokenizer, image_tokens and vis_processor
    processor: FilePath | None = None
    # with `processor`: name of a template in configs/chat_templates, Jinja source, or a Jinja file; None: its own
    chat_template: Text | None = None
    frames_per_second: PositiveFloat = 2.0  # with `processor`: of the frames of videos
    # with `processor`: pack samples up to max_length, without attention between them
    packing: bool = False
    # tokenizer of the language model: a Hugging Face name, a folder or a tokenizer.json; required without `processor`
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

    def __init__(self, options: Any, split: Split) -> None:
        super().__init__(options, split)
        self.text_processor: TextProcessor = _processor(options.text_processor, split)
        vision = _processor(options.vis_processor, split) if options.processor is None else None
        self.encoder = _encoder(options, self.text_processor, vision)
        self.image_processor: ImageProcessor | None = vision
        self.tokenizer_path, self.end_tokens = self.encoder.folder, self.encoder.end_tokens
        self.vocab_size = self.encoder.tokenizer.vocab_size
        self.sequence_length = options.max_length
        self.skipped: dict[int, str] = {}
        self.tried = 0

    @classmethod
    def open(cls, options: Any, split: Split) -> Dataset:
        rows = cls(options, split)
        return PackedImages(rows) if options.packing else rows

    @classmethod
    def shapes(cls, options: Any) -> Batch | None:
        """Return the shapes of a batch with one image; None if `max_length` is not set.

        With a processor, the batch has no image, because the sizes of images differ.
        """
        if options.max_length is None:
            return None
        ids = torch.zeros(1, options.max_length, dtype=torch.int64, device="meta")
        if options.processor is not None:
            return {"input_ids": ids, "labels": ids, "mm_token_type_ids": ids}
        pixels = _blank(_processor(options.vis_processor))
        return {"input_ids": ids, "labels": ids, "pixel_values": torch.empty(1, *pixels.shape, device="meta")}

    @property
    def image_sizes(self) -> frozenset[tuple[int, int]]:  # type: ignore[override]
        if self.image_processor is None:  # images of any size
            return frozenset()
        height, width = _blank(self.image_processor).shape[-2:]
        return frozenset({(height, width)})

    @classmethod
    def used(cls, options: Any, split: Split) -> frozenset[str]:
        """Return the annotation keys that are not reported as unused; empty if the processor declares no keys."""
        keys = getattr(_processor(options.text_processor, split), "keys", ())
        return frozenset(("images", "text_only", *keys, *options.ignore_columns) if keys else ())

    def state(self) -> list[Any]:
        """Return values that change if the samples change: options, number of samples, and states of named files."""
        paths = [Path(value).expanduser() for value in vars(self.options).values() if isinstance(value, str)]
        files = [file_state(path) for path in paths if path.exists()]
        return [type(self).__name__, self.split, repr(self.options), len(self), str(self.encoder.folder), files]

    @abstractmethod
    def read(self, index: int) -> tuple[list[Any], Annotation]:
        """Return a sample's PIL images and annotation. Raises SampleError if the sample cannot be read.

        A video is a list of PIL images. A sample has either images or videos.
        """

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
        videos = sum(isinstance(image, list) for image in images)
        conversations = self.text_processor(annotation, len(images) - videos, rng)
        for conversation in conversations:
            check_images(conversation, len(images) - videos, videos)
        seen: Any = self.encoder.process(images, rng)
        return self._fit(self.encoder.sample(conversations, seen))

    def _fit(self, sample: Sample) -> Sample:
        limit, length = self.options.max_length, len(sample["input_ids"])
        if limit is None or length <= limit:
            return sample
        reason = f"it has {length} tokens, and max_length is {limit}"
        if self.options.too_long == "error":
            raise DataError(
                f"{self._name()}: a sample is too long: {reason}; raise max_length, or set too_long to skip or truncate"
            )
        cut = self.encoder.cut(sample, limit) if self.options.too_long == "truncate" else None
        if cut is None or (cut["labels"] < 0).all():  # an image would be cut, or no target would remain
            raise SampleError(reason)
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
        return self.encoder.collate(samples)

    def examples(self, index: int) -> list[Example]:
        try:
            self.tried += 1
            images, annotation = self.read(index)
            asked = self.text_processor.questions(annotation, sum(not isinstance(image, list) for image in images))
        except SampleError as error:
            self.skip(index, str(error))
            return []
        seen: Any = self.encoder.process(images, np.random.default_rng(0))
        picture, made = next((image for image in images if not isinstance(image, list)), None), []
        for conversation, given, kind in asked:
            answers = (given,) if isinstance(given, str) else tuple(given)
            prompt, usual = self.encoder.prompt(conversation, seen), max(answers, key=answers.count)
            made.append(Example(prompt, conversation[-1].text, usual, kind, picture, answers))
        return made

    @classmethod
    def prompt_builder(cls, options: Any, tokenizer: Path, encode: EncodeText | None = None) -> PromptBuilder:
        text: TextProcessor = _processor(options.text_processor)
        key = "tokenizer" if options.processor is None else "processor"  # a checkpoint has the processor's files
        options = replace(options, **{key: str(tokenizer)})
        return ImagePrompts(
            _encoder(options, text, _processor(options.vis_processor), encode),
            getattr(text, "asked", list),  # a processor need not define `asked`
        )


def _encoder(
    options: Any, text: TextProcessor, vision: ImageProcessor | None, encode: EncodeText | None = None
) -> Encoder:
    """Make the encoder that the options name. Raises DataError if they contradict each other."""
    if options.processor is not None:
        return ProcessorEncoder(
            options.processor, options.chat_template, text.style, options.blind, options.frames_per_second
        )
    for key in ("chat_template", "packing"):
        if getattr(options, key):
            raise DataError(f"{key} needs a processor: set processor to the model's processor, or remove {key}")
    if options.tokenizer is None:
        raise DataError("tokenizer is missing: set it to the language model's tokenizer")
    tokenizer, folder = load_cached(options.tokenizer)
    return ConversationEncoder(tokenizer, options.image_tokens, text.style, encode, vision, options.blind, folder)


def _blank(processor: ImageProcessor) -> np.ndarray:
    """Process a black image. All processed images have the same shape."""
    from PIL import Image

    return processor(Image.new("RGB", (64, 64)), np.random.default_rng(0))


def _processor(given: Processors, split: Split = "val") -> Any:
    component = given.train if split == "train" else given.eval
    return registry.get("processor", component.name)(component.options)


class PackedImages(VqaDataset):
    """Rows of several samples of an image dataset, as separate documents.

    The lengths are measured once, into a cache; unusable samples are left out. The texts of a sample do not change
    between epochs. Raises DataError if the share of unusable samples exceeds `max_skipped`.
    """

    documents = True

    def __init__(self, rows: ImageDataset) -> None:
        super().__init__(rows.options, rows.split)
        if rows.options.max_length is None:
            raise DataError("packing needs max_length, the number of tokens of a packed sample")
        self.rows = rows
        self.vocab_size, self.tokenizer_path = rows.vocab_size, rows.tokenizer_path
        self.end_tokens = rows.end_tokens
        self.sequence_length = rows.options.max_length
        lengths = measured(rows)
        self.usable = np.flatnonzero(lengths)
        if (left_out := len(lengths) - len(self.usable)) > rows.options.max_skipped * len(lengths):
            raise DataError(
                f"{left_out} of {len(lengths)} samples cannot be used, which is more than "
                f"max_skipped={rows.options.max_skipped}; without packing, the log gives the reasons"
            )
        self.packs = pack(lengths[self.usable].tolist(), rows.options.max_length)
        left = f"{left_out} of {len(lengths)} samples cannot be used and are left out" if left_out else ""
        self.notice = "; ".join(filter(None, (rows.notice, left)))

    def __len__(self) -> int:
        return len(self.packs)

    def numbers(self, index: int) -> list[int]:
        """Return the indices of a row's samples in the image dataset."""
        return [int(self.usable[number]) for number in self.packs[index]]

    def get(self, index: int, rng: np.random.Generator) -> Sample:
        try:
            return joined([usable_sample(self.rows, number) for number in self.numbers(index)])
        except SampleError as error:
            raise DataError(f"{self.location(index)}: it changed since its tokens were counted ({error})") from None

    def collate(self, samples: list[Sample]) -> Batch:
        return self.rows.collate(samples)

    def location(self, index: int) -> str:
        return " and ".join(map(self.rows.location, self.numbers(index)))

    def examples(self, index: int) -> list[Example]:
        return [example for number in self.numbers(index) for example in self.rows.examples(number)]


def usable_sample(rows: ImageDataset, index: int) -> Sample:
    """Return a sample with the texts that its index draws. Raises SampleError if it cannot be used."""
    return rows.sample(*rows.read(index), np.random.default_rng(index))


def measured(rows: ImageDataset) -> np.ndarray:
    """Return the numbers of tokens [samples], 0 for unusable ones; they are measured unless they are in the cache."""

    def length(index: Any) -> int:
        try:
            return len(usable_sample(rows, index)["input_ids"])
        except SampleError:
            return 0

    path = cache_folder("lengths") / f"{key_of(_FORMAT, rows.state())[:16]}.npy"
    with output_lock(path, wait=True):
        if path.exists():
            return np.load(path, allow_pickle=False)
        workers = cores() if len(rows) > _MANY else 0
        loader: Any = DataLoader(
            range(len(rows)),  # type: ignore[arg-type]
            None,
            num_workers=workers,
            collate_fn=length,  # called in the worker processes
            multiprocessing_context=CheckedForkContext() if workers else None,
        )
        lengths = np.fromiter(map(int, loader), np.int64, len(rows))
        with replacing(path) as file:
            np.save(file, lengths)
    return lengths
