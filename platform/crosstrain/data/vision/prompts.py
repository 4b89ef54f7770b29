"""Prompts about images: from questions with known answers, and from what a person types."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from crosstrain.config.registry import registry
from crosstrain.config.schema import Component
from crosstrain.data.dataset import Dataset
from crosstrain.data.vision.conversations import Conversation, ConversationEncoder, SampleError, check_images
from crosstrain.utils.errors import UserError
from crosstrain.utils.types import Sample


@dataclass(frozen=True)
class Example:
    """A question with a known answer. `prompt` is a sample without labels; scores are grouped by `kind`."""

    prompt: Sample
    question: str
    answer: str
    kind: str
    picture: Any = None  # a PIL image, to show


class PromptBuilder:
    """A builder of prompts from conversations about images, in the form of a dataset's evaluation splits.

    image_processor: see `crosstrain.data.vision.image_dataset.ImageProcessor`.
    """

    def __init__(self, image_processor: Any, encoder: ConversationEncoder) -> None:
        self.image_processor, self.encoder = image_processor, encoder
        self.end_id = encoder.end_id  # the token that ends an answer

    def ask(self, conversation: Conversation, images: list[Any]) -> Sample:
        """Return a sample without labels that ends where the assistant's next words begin.

        images: PIL images, one for each placeholder in the conversation. Raises UserError where the numbers differ.
        """
        try:
            check_images(conversation, len(images))
        except SampleError as error:
            raise UserError(str(error)) from None
        rng = np.random.default_rng(0)
        pixels = np.stack([self.image_processor(image, rng) for image in images]) if images else None
        return self.encoder.prompt(conversation, pixels)


class VqaDataset(Dataset):
    """A dataset with questions and prompts about images, for `evaluate --answers` and for chats."""

    @abstractmethod
    def examples(self, index: int) -> list[Example]:
        """Return questions about sample `index` with known answers."""

    @classmethod
    @abstractmethod
    def prompt_builder(cls, options: Any, tokenizer: Path) -> PromptBuilder:
        """Make the prompt builder for a model trained on such data. The data need not exist.

        tokenizer: folder of a checkpoint's tokenizer. Raises UserError where there are no conversations.
        """


def prompt_builder(dataset: Component, tokenizer: Path) -> PromptBuilder:
    """Make the prompt builder of a configured dataset. Raises UserError if it has no conversations about images."""
    kind = registry.get("dataset", dataset.name)
    if not issubclass(kind, VqaDataset):
        raise UserError(f"{kind.__name__} has no conversations, so questions about images cannot be asked")
    return kind.prompt_builder(dataset.options, tokenizer)
