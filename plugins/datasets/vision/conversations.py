"""Tokenize conversations about images: roles, image placeholders, and target tokens."""

import itertools
import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from crosstrain import IGNORE_INDEX, Batch, Conversation, DataError, EncodeText, Sample, SampleError, TextTokenizer

from ...commands.prepare.chat_template import EncodedChat, refuse_if
from ..packing import padded_rows

IMAGE, VIDEO = "<image>", "<video>"  # placeholders of an image and of a video in a message's text
IMAGE_ID = -200  # placeholder of one image embedding in input_ids, as in LLaVA
SHARED = 0  # segment ID of tokens that all segments of a sample attend to

Style = Literal["chat", "plain"]
# Placeholders of other media, at the beginning or end of a line. Elsewhere, such tags may be HTML.
_OTHER_MEDIA = re.compile(r"^\s*<(?:video|audio)>|<(?:video|audio)>\s*$", re.MULTILINE)
_HALF_A_PAIR = re.compile("[\ud800-\udfff]")
_REMEMBERED = 1 << 14  # number of texts whose tokens are cached
_START, _END = "<|im_start|>", "<|im_end|>"
_BEFORE_IMAGE, _AFTER_IMAGE = "<|vision_start|>", "<|vision_end|>"  # tokens of newer Qwen tokenizers


class ConversationEncoder:
    """An encoder of conversations. Each image becomes `image_tokens` copies of `IMAGE_ID`.

    Style `chat` is Qwen's ChatML (`<|im_start|>role\\n ... <|im_end|>\\n`). The targets are the assistant's text and
    the `<|im_end|>` after it. Style `plain` concatenates the texts. The targets are the assistant's text and the
    end-of-text token after it. Raises DataError for a tokenizer that lacks the style's tokens.
    """

    def __init__(
        self,
        tokenizer: TextTokenizer,
        image_tokens: int,
        style: Style,
        encode: EncodeText | None = None,
        image_processor: Callable[[Any, np.random.Generator], np.ndarray] | None = None,
        blind: bool = False,
        folder: Path | None = None,
    ) -> None:
        """encode: function to use instead of the tokenizer's `encode`, as in a server.

        image_processor: converts a PIL image to fp32 [3, height, width]. blind: replace images with zeros. folder:
        files of the tokenizer.
        """
        self.folder, self.end_tokens = folder, ()
        self.tokenizer, self.style, self.image_processor, self.blind = tokenizer, style, image_processor, blind
        self.end_id = tokenizer.end_id  # the token that ends an answer
        if style == "chat":
            for token in (_START, _END):
                if tokenizer.backend.token_to_id(token) is None:
                    raise DataError(f"the tokenizer has no token {token}, which chats need; use a Qwen tokenizer")
            self.start, self.end_id = map(tokenizer.backend.token_to_id, (_START, _END))
        before, after = map(tokenizer.backend.token_to_id, (_BEFORE_IMAGE, _AFTER_IMAGE))
        block = [IMAGE_ID] * image_tokens
        self._text = lru_cache(_REMEMBERED)(encode or tokenizer.encode)  # prompts and short answers recur
        self.image = block if before is None or after is None else [before, *block, after]

    def encode(self, conversation: Conversation, *, answering: bool = False) -> EncodedChat:
        """Encode a conversation. With `answering`, the result ends where the assistant's next text begins."""
        parts: list[tuple[list[int], bool]] = []  # (IDs, whether they are targets)
        for message in conversation:
            answer = message.role == "assistant" and message.learned
            content = self._content(message.text)
            if self.style == "chat":
                parts += [([self.start, *self._text(f"{message.role}\n")], False), (content, answer)]
                parts += [([self.end_id], answer), (self._text("\n"), False)]
            else:
                parts += [(content, answer), ([self.end_id] * (message.role == "assistant"), answer)]
        if answering and self.style == "chat":
            parts.append(([self.start, *self._text("assistant\n")], False))
        return EncodedChat([i for ids, _ in parts for i in ids], [learn for ids, learn in parts for _ in ids])

    def prompt(self, conversation: Conversation, pixels: np.ndarray | None) -> Sample:
        """Return a sample without labels that ends where an answer begins. pixels: [images, 3, H, W]."""
        ids = np.array(self.encode(conversation, answering=True).ids, np.int64)
        return {"input_ids": ids} | ({} if pixels is None else {"pixel_values": pixels})

    def process(self, images: list[Any], rng: np.random.Generator) -> np.ndarray | None:
        """Process PIL images into fp32 [images, 3, height, width]; None without images."""
        if not images:
            return None
        assert self.image_processor is not None
        refuse_if(
            any(isinstance(image, list) for image in images),
            "it has videos, which need a model with a processor of videos",
        )
        made = [self.image_processor(image, rng) for image in images]
        pixels = np.stack(made) if len(made) > 1 else made[0][None]  # one image needs no copy
        return np.zeros_like(pixels) if self.blind else pixels

    def sample(self, conversations: Sequence[Conversation], pixels: np.ndarray | None = None) -> Sample:
        """Return input_ids and labels [length], and pixel_values [images, 3, height, width] if there are images.

        Several conversations about the same images share their common prefix. For several conversations, `segments`
        gives the conversation of each token (`SHARED`, 1, 2, ...), and `position_ids` restart after the prefix for each
        conversation. If tokens attend only to the shared tokens and to their own segment, each conversation gives the
        same results as in a sample of its own. Raises SampleError if there are no targets.
        """
        encoded = [self.encode(c) for c in conversations]
        refuse_if(
            not encoded or not all(any(tokens.is_target) for tokens in encoded),
            "there is no assistant turn to train on",
        )
        seen = {} if pixels is None else {"pixel_values": pixels}
        if len(encoded) == 1:
            return _arrays(encoded[0].ids[:-1], encoded[0].labels) | seen
        shared = self._shared(encoded)
        ids, labels = encoded[0].ids[:shared], [IGNORE_INDEX] * shared
        segments, positions = [SHARED] * shared, list(range(shared))
        for number, tokens in enumerate(encoded, 1):
            own = tokens.ids[shared:-1]
            ids += own
            labels += tokens.labels[shared:]
            segments += [number] * len(own)
            positions += range(shared, shared + len(own))
        return _arrays(ids, labels, segments=segments, position_ids=positions) | seen

    def cut(self, sample: Sample, limit: int) -> Sample | None:
        """Return the first `limit` tokens of a sample; None if an image would be cut."""
        if (sample["input_ids"][limit:] < 0).any():
            return None
        return {key: value if key == "pixel_values" else value[:limit] for key, value in sample.items()}

    @staticmethod
    def collate(samples: list[Sample]) -> Batch:
        """Make a batch: sequences [batch, length], padded on the right, and all images in one tensor [images, 3, H, W].

        The length is a multiple of 8, for tensor cores and sequence parallelism. Padding is at the end and is not a
        target, so a causal model needs no mask for it. The batch has `segments` and `position_ids` only if a sample has
        segments.
        """
        rows = [{key: row for key, row in s.items() if key != "pixel_values"} for s in samples]
        if any("segments" in row for row in rows):
            rows = [
                {"segments": np.full(len(row["input_ids"]), SHARED), "position_ids": np.arange(len(row["input_ids"]))}
                | row
                for row in rows
            ]
        batch = padded_rows(rows)
        if images := [torch.from_numpy(s["pixel_values"]) for s in samples if len(s.get("pixel_values", ()))]:
            batch["pixel_values"] = torch.cat(images)
        return batch

    def _shared(self, encoded: list[EncodedChat]) -> int:
        """Return the length of the common prefix of all conversations, up to the token before the first target."""
        same = (len(set(column)) == 1 for column in zip(*(t.ids for t in encoded), strict=False))
        shared = sum(1 for _ in itertools.takewhile(bool, same))
        shared = min(shared, *(tokens.is_target.index(True) - 1 for tokens in encoded))
        refuse_if(
            any(IMAGE_ID in tokens.ids[shared:] for tokens in encoded),
            "conversations about the same images must all begin with these images",
        )
        return shared

    def _content(self, text: str) -> list[int]:
        first, *rest = text.split(IMAGE)
        return self._text(first) + [i for part in rest for i in (*self.image, *self._text(part))]


def _arrays(ids: list[int], labels: list[int], **more: list[int]) -> Sample:
    return {key: np.array(row, np.int64) for key, row in {"input_ids": ids, "labels": labels, **more}.items()}


def check_images(conversation: Conversation, images: int, videos: int = 0) -> None:
    """Raise SampleError unless a conversation is valid text with one placeholder per image or video."""
    if (named := sum(message.text.count(IMAGE) for message in conversation)) != images:
        raise SampleError(f"the text has {named} <image> placeholders, but the sample has {images} images")
    if videos and (named := sum(message.text.count(VIDEO) for message in conversation)) != videos:
        raise SampleError(f"the text has {named} <video> placeholders, but the sample has {videos} videos")
    for message in conversation:
        text = message.text.replace(VIDEO, "") if videos else message.text
        if message.role == "user" and (other := _OTHER_MEDIA.search(text)):
            raise SampleError(f"the text has the placeholder {other[0].strip()}, but only images are supported")
        refuse_if(
            _HALF_A_PAIR.search(message.text),
            "the text contains half a surrogate pair, which is not a valid character",
        )
