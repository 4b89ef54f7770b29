"""Conversations for instruction tuning, rendered by the tokenizer's own chat template."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import torch
from annotated_types import Interval

from crosstrain import (
    IGNORE_INDEX,
    SPLITS,
    Batch,
    DataError,
    Dataset,
    FilePath,
    OptionError,
    Sample,
    Split,
    Text,
    registry,
)
from crosstrain.corpus.chat import ChatSource, prepare_chat
from crosstrain.data.indexed_dataset import TokenFile
from crosstrain.data.packing import pack
from crosstrain.data.tokenizer import TextTokenizer, cached_folder, load_tokenizer


@registry.register_dataset("chat")
class Chat(Dataset):
    """Conversations whose targets are what the assistant writes, one in a sample or packed.

    input_ids, labels: int64 [length]. With `packing`, whole conversations share a sample; position_ids restart at
    each, and attention does not cross them.
    """

    @dataclass
    class Options:
        """Files of conversations, their splits, and the length of a sample."""

        # JSON lines, JSON lists or Parquet, folders of them, or a folder of `datasets.save_to_disk`
        path: FilePath | list[FilePath]
        tokenizer: FilePath  # a Hugging Face name or a folder: the model's
        seq_length: Annotated[int, Interval(ge=1, le=2**30)]  # most tokens of a sample
        chat_template: Text | None = None  # Jinja, in place of the tokenizer's own
        train_on: Literal["assistant", "last", "all"] = "assistant"  # turns: the assistant's, its last one, or all
        packing: bool = False  # True: several conversations share a sample, and do not see each other
        # conversations that are malformed, too long or without a target
        unusable: Literal["drop", "error"] = "drop"
        # shares of train, val, test, in file order
        split: list[Annotated[float, Interval(ge=0, le=10**12)]] = field(default_factory=lambda: [1.0, 0.0, 0.0])

        def __post_init__(self) -> None:
            if not 1 <= len(self.split) <= 3 or not sum(self.split):
                raise OptionError("split", f"must be up to three shares such as [95, 5, 0], not {self.split}")

    options: Options

    @classmethod
    def prepare(cls, options: Options) -> None:
        """Render and tokenize the conversations once, in a folder of the cache."""
        _prepared(options)

    @classmethod
    def shapes(cls, options: Options) -> Batch:
        ids = torch.zeros(1, options.seq_length, dtype=torch.int64, device="meta")
        return {"input_ids": ids, "labels": ids} | ({"position_ids": ids} if options.packing else {})

    def __init__(self, options: Options, split: Split) -> None:
        super().__init__(options, split)
        tokenizer, self.tokenizer_path = _tokenizer(options.tokenizer, options.chat_template)
        self.vocab_size, self.sequence_length = tokenizer.vocab_size, options.seq_length
        self.documents = options.packing
        self.folder = _prepared(options)
        self.file = TokenFile(self.folder / "tokens")
        total = self.file.num_documents
        k, shares = SPLITS.index(split), [*options.split, 0.0, 0.0][:3]
        self.start, stop = (round(sum(shares[:n]) / sum(shares) * total) for n in (k, k + 1))
        if self.start == stop:
            raise DataError(
                f"the {split} split of {options.path} has none of its {total} conversations: "
                f"change split={options.split}"
            )
        lengths = (self.file.sizes[self.start : stop].astype(np.int64) - 1).tolist()
        self.packs = pack(lengths, options.seq_length) if options.packing else [[n] for n in range(len(lengths))]

    def __len__(self) -> int:
        return len(self.packs)

    def get(self, index: int, rng: np.random.Generator) -> Sample:
        parts = [self.file.document(self.start + number).astype(np.int64) for number in self.packs[index]]
        ids = [np.where(part < 0, ~part, part) for part in parts]
        labels = [np.where(part < 0, ~part, IGNORE_INDEX)[1:] for part in parts]
        sample = {"input_ids": np.concatenate([part[:-1] for part in ids]), "labels": np.concatenate(labels)}
        if self.options.packing:
            sample["position_ids"] = np.concatenate([np.arange(len(part) - 1) for part in parts])
        return sample

    def location(self, index: int) -> str:
        places = _places(self.folder)
        return " and ".join(places[self.start + number] for number in self.packs[index])

    def shorten(self, batch: Batch, length: int) -> Batch:
        return {key: tokens[:, :length] for key, tokens in batch.items()}

    def collate(self, samples: list[Sample]) -> Batch:
        """Pad on the right; padding is a document of its own."""
        longest = max(len(sample["input_ids"]) for sample in samples)
        batch = {key: torch.zeros(len(samples), longest, dtype=torch.long) for key in samples[0]}
        batch["labels"].fill_(IGNORE_INDEX)
        for row, sample in enumerate(samples):
            length = len(sample["input_ids"])
            for key, values in sample.items():
                batch[key][row, :length] = torch.from_numpy(values)
            if self.options.packing:
                batch["position_ids"][row, length:] = torch.arange(longest - length)
        return batch


def _prepared(options: Chat.Options) -> Path:
    paths = (options.path,) if isinstance(options.path, str) else tuple(options.path)
    _, tokenizer = _tokenizer(options.tokenizer, options.chat_template)
    return prepare_chat(
        ChatSource(paths, tokenizer, options.train_on, options.seq_length, drops=options.unusable == "drop")
    )


@lru_cache(maxsize=4)
def _places(folder: Path) -> list[str]:
    return (folder / "places.txt").read_text(encoding="utf-8").split("\n")


@lru_cache(maxsize=4)
def _tokenizer(spec: str, template: str | None) -> tuple[TextTokenizer, Path]:
    """Return the tokenizer and a folder of it, which has the template if one is given."""
    tokenizer = load_tokenizer(spec)
    if template is not None:
        tokenizer = replace(tokenizer, chat_template=template)
    return tokenizer, cached_folder(tokenizer)
