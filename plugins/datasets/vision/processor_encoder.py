"""Tokenize conversations about images with a model's own processor from transformers."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from crosstrain import (
    Batch,
    Conversation,
    DataError,
    LimitedProcess,
    Message,
    Sample,
    SampleError,
    check_source,
    first_line,
)
from crosstrain.data.join import join_padded

from ...commands.prepare.chat_template import ChatError, ChatTemplate, EncodedChat, load_with_template, refuse_if
from ..packing import padded_rows
from .conversations import IMAGE, VIDEO, Style

_PER_TOKEN = {"input_ids", "labels", "position_ids", "mm_token_type_ids"}  # fields with one value per token
_OF_TEXT = {"attention_mask", "token_type_ids", "text_replacement_offsets", *_PER_TOKEN}  # not of images
_BLANK = 32  # height and width in pixels of the image in micro batches without images


@dataclass(frozen=True)
class Processed:
    """Images or videos of a sample: the processor's arrays for the model, and the texts that replace placeholders."""

    fields: dict[str, np.ndarray]
    texts: list[str]
    placeholder: str = IMAGE  # or VIDEO


@lru_cache(maxsize=4)
def load_processor(spec: str) -> Any:
    """Load a processor of transformers. Raises DataError if there is none, or if it does not take images and text."""
    from transformers import AutoProcessor

    check_source(f"the processor {spec}")
    try:
        processor = AutoProcessor.from_pretrained(Path(spec).expanduser(), trust_remote_code=False)
    except Exception as error:  # transformers raises errors of many types
        raise DataError(f"processor: {spec} has no processor that can be loaded ({first_line(error)[:300]})") from None
    if getattr(processor, "image_token", None) is None or getattr(processor, "tokenizer", None) is None:
        raise DataError(f"processor: {spec} is a {type(processor).__name__}, not a processor of images and text")
    return processor


class ProcessorEncoder:
    """An encoder of conversations for an image-text model of transformers.

    The processor's chat template renders a conversation, and its image processor decides how many tokens each image
    gets. Targets are found as for conversations without images. A sample has one document per conversation, and
    `position_ids` restart at each document.
    """

    def __init__(
        self, spec: str, chat_template: str | None, style: Style, blind: bool = False, frames_per_second: float = 2.0
    ) -> None:
        """spec: a processor's folder or Hugging Face name. chat_template: used instead of the processor's own.

        style: `plain` concatenates the texts of turns without a template. blind: replace images with gray ones.
        """
        self.processor, self.style, self.blind = load_processor(spec), style, blind
        self.frames_per_second = frames_per_second
        template = chat_template or self.processor.chat_template
        if isinstance(template, dict):
            template = template.get("default")
        self.tokenizer, self.folder = load_with_template(spec, template)
        self.template = ChatTemplate(self.folder)  # before processes are forked
        self._limited = LimitedProcess(self._encode, f"the chat template or the tokenizer of {spec}")
        self.end_id = self._end()
        self.end_tokens = tuple({self.tokenizer.end_id, self.end_id})

    def _end(self) -> int:
        """Return the token that ends the assistant's turn; it may differ from the tokenizer's end-of-text token."""
        try:
            (tokens,) = self.encode([[Message("user", "a"), Message("assistant", "b")]], Processed({}, []))
        except SampleError:  # the template needs an image
            return self.tokenizer.end_id
        return max(zip(tokens.is_target, range(len(tokens.ids)), tokens.ids, strict=True))[2]

    @cached_property
    def blank(self) -> Sample:
        """A document with a small image and no target, for micro batches without images.

        Every rank must compute the vision model in every step, because gradients and shards are exchanged.
        """
        from PIL import Image

        processed = self.process([Image.new("RGB", (_BLANK, _BLANK), "gray")])
        ids = self.template.backend.encode(processed.texts[0], add_special_tokens=False).ids
        return self._sample([EncodedChat([*ids, self.end_id], [False] * (len(ids) + 1))], processed)

    # ---- images

    def process(self, images: list[Any], rng: np.random.Generator | None = None) -> Processed:
        """Process PIL images, or videos, which are lists of PIL images. Raises SampleError if the processor fails."""
        if not images:
            return Processed({}, [])
        if self.blind:
            images = [_gray(image) for image in images]
        videos = isinstance(images[0], list)
        media = self._videos(images) if videos else {"images": [images]}
        placeholder = VIDEO if videos else IMAGE
        text = [self._token(placeholder) * len(images)]
        try:
            made = self.processor(text=text, return_tensors="pt", return_text_replacement_offsets=True, **media)
        except Exception as error:  # processors may raise anything, for example for extreme aspect ratios
            raise SampleError(f"the processor rejects its images ({first_line(error)[:200]})") from None
        (found,) = made["text_replacement_offsets"]
        fields = {key: torch.as_tensor(value).numpy() for key, value in made.items() if key not in _OF_TEXT}
        return Processed(fields, [each["replacement"] for each in found], placeholder)

    def _token(self, placeholder: str) -> str:
        """Return the processor's placeholder in a rendered text."""
        return self.processor.video_token if placeholder == VIDEO else self.processor.image_token

    def _videos(self, videos: list[list[Any]]) -> dict[str, Any]:
        """Return the processor's arguments for videos; all their frames are used."""
        from transformers.video_utils import VideoMetadata

        refuse_if(
            getattr(self.processor, "video_token", None) is None,
            f"it has videos, but the model's {type(self.processor).__name__} takes none",
        )
        metadata = [
            VideoMetadata(len(frames), fps=self.frames_per_second, frames_indices=list(range(len(frames))))
            for frames in videos
        ]
        arrays = [np.stack([np.asarray(frame) for frame in frames]) for frames in videos]
        return {"videos": arrays, "video_metadata": metadata, "do_sample_frames": False}

    # ---- text

    def encode(
        self, conversations: Sequence[Conversation], processed: Processed, answering: bool = False
    ) -> list[EncodedChat]:
        """Tokenize conversations in a process with limits; each has the processed images.

        answering: end where the assistant's text begins. Raises SampleError for conversations that cannot be used.
        """
        size = sum(len(message.text) for conversation in conversations for message in conversation)
        found = self._limited((conversations, processed.texts, processed.placeholder, answering), size)
        if isinstance(found, str):
            raise SampleError(found)
        return [EncodedChat(*tokens) for tokens in found]

    def _encode(
        self, given: tuple[Sequence[Conversation], list[str], str, bool]
    ) -> list[tuple[list[int], list[bool]]] | str:
        """Render and tokenize conversations in this process, or return the reason why one cannot be used."""
        conversations, texts, placeholder, answering = given
        try:
            return [self._tokens(conversation, texts, placeholder, answering) for conversation in conversations]
        except ChatError as error:
            return str(error)

    def _tokens(
        self, conversation: Conversation, texts: list[str], placeholder: str, answering: bool
    ) -> tuple[list[int], list[bool]]:
        turns = [_turn(message, placeholder) for message in conversation]
        self.template.check(turns, None)
        if self.style == "plain":
            text, spans = self._plain(conversation, placeholder)
        elif answering:
            text, spans = self.template.render(turns, answering=True), []
        else:
            text, spans, _ = self.template.located(turns, None)
        return self.template.tokens(*_filled(text, spans, self._token(placeholder), texts))

    def _plain(self, conversation: Conversation, placeholder: str) -> tuple[str, list[tuple[int, int]]]:
        """Concatenate texts; the assistant's end with the end-of-text token."""
        text, spans = "", []
        for message in conversation:
            start = len(text)
            text += message.text.replace(placeholder, self._token(placeholder))
            if message.role == "assistant":
                text += self.tokenizer.end
                spans += [(start, len(text))] if message.learned else []
        return text, spans

    # ---- samples

    def sample(self, conversations: Sequence[Conversation], processed: Processed) -> Sample:
        """Return a sample with one document per conversation; each has all images.

        input_ids, labels, position_ids, mm_token_type_ids (1 for tokens of images, 2 of videos): int64 [length]. Other
        fields are the processor's, with the images of all documents in order. Raises SampleError if there are no
        targets.
        """
        encoded = self.encode(conversations, processed)
        refuse_if(
            not encoded or not all(any(tokens.is_target) for tokens in encoded),
            "there is no assistant turn to train on",
        )
        return self._sample(encoded, processed)

    def _sample(self, encoded: list[EncodedChat], processed: Processed) -> Sample:
        parts = []
        for tokens in encoded:
            ids = np.array(tokens.ids, np.int64)
            parts.append(self._fields(ids[:-1]) | {"labels": np.array(tokens.labels, np.int64)} | processed.fields)
        return joined(parts)

    def _fields(self, ids: np.ndarray) -> Sample:
        kinds = np.isin(ids, self.processor.image_token_ids) + 2 * np.isin(ids, self.processor.video_token_ids)
        return {"input_ids": ids, "position_ids": np.arange(len(ids)), "mm_token_type_ids": kinds.astype(np.int64)}

    def prompt(self, conversation: Conversation, processed: Processed) -> Sample:
        """Return a sample without labels that ends where an answer begins."""
        (tokens,) = self.encode([conversation], processed, answering=True)
        ids = np.array(tokens.ids, np.int64)
        return {key: value for key, value in self._fields(ids).items() if key != "position_ids"} | processed.fields

    def cut(self, sample: Sample, limit: int) -> Sample | None:
        """Return the first `limit` tokens of a sample; None if an image would be cut."""
        if (sample["mm_token_type_ids"][limit:] != 0).any():
            return None
        return {key: value[:limit] if key in _PER_TOKEN else value for key, value in sample.items()}

    def collate(self, samples: list[Sample]) -> Batch:
        """Make a batch: rows padded on the right, and the fields of all images in one tensor each.

        A batch without images gets a small image after the shortest row; no token before it attends to it. If a row has
        several documents, the batch has `position_ids`, and padding is a document of its own.
        """
        restarts = any((sample["position_ids"][1:] == 0).any() for sample in samples)
        if not any(sample.keys() - _PER_TOKEN for sample in samples):
            shortest = min(range(len(samples)), key=lambda number: len(samples[number]["input_ids"]))
            samples = [*samples[:shortest], joined([samples[shortest], self.blank]), *samples[shortest + 1 :]]
        rows = padded_rows([{key: sample[key] for key in sample if key in _PER_TOKEN} for sample in samples])
        images = joined([{key: sample[key] for key in sample if key not in _PER_TOKEN} for sample in samples])
        batch = rows | {key: torch.from_numpy(value) for key, value in images.items()}
        return batch if restarts else {key: value for key, value in batch.items() if key != "position_ids"}


def _gray(given: Any) -> Any:
    """Return a gray image of an image's size, or such frames for the frames of a video."""
    return [_gray(frame) for frame in given] if isinstance(given, list) else given.point(lambda _: 128)


def joined(parts: list[Sample]) -> Sample:
    """Concatenate the fields of samples or rows along their first dimension; some may lack images.

    Processors pad the images of a sample to equal shapes, so samples may differ; see `join_padded`.
    """
    keys = dict.fromkeys(key for part in parts for key in part)
    return {key: join_padded([torch.from_numpy(p[key]) for p in parts if key in p]).numpy() for key in keys}


def _turn(message: Message, placeholder: str) -> dict[str, Any]:
    """Return a message with its text and images as parts, the form that processors' templates expect."""
    pieces = re.split(f"({placeholder})", message.text)
    kind = {"type": placeholder.strip("<>")}
    parts = [kind if p == placeholder else {"type": "text", "text": p} for p in pieces if p or len(pieces) == 1]
    return {"role": message.role, "content": parts} | ({} if message.learned else {"weight": 0})


def _filled(text: str, spans: list[tuple[int, int]], token: str, texts: list[str]) -> tuple[str, list[tuple[int, int]]]:
    """Replace the image tokens in a text, and return it with the shifted spans. Raises ChatError if counts differ."""
    pieces = text.split(token)
    refuse_if(len(pieces) - 1 != len(texts), f"the chat template writes {len(pieces) - 1} of its {len(texts)} images")

    def moved(place: int) -> int:
        return place + sum(len(replacement) - len(token) for replacement in texts[: text.count(token, 0, place)])

    filled = pieces[0] + "".join(a + b for a, b in zip(texts, pieces[1:], strict=True))
    return filled, [(moved(start), moved(stop)) for start, stop in spans]
