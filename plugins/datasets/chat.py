"""Conversations for instruction tuning, rendered by a chat template."""

from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from annotated_types import Interval

from crosstrain import (
    IGNORE_INDEX,
    SPLITS,
    Batch,
    Dataset,
    FilePath,
    Sample,
    Split,
    SplitOptions,
    Text,
    registry,
)

from ..commands.prepare.chat import ChatSource, check_inputs, prepare_chat, row_audit
from ..commands.prepare.chat_template import TrainOn, load_with_template
from .indexed_dataset import TokenFile
from .packing import pack, padded_rows


@dataclass
class ConversationOptions(SplitOptions):
    """Files of conversations, their splits, and the length of a sample."""

    elsewhere: ClassVar = {"unusable": "`max_dropped: 0` refuses data with an unusable row"}
    former: ClassVar = {"unusable": "drop"}

    # files of JSON lines, JSON lists or Parquet, folders of such files, or a folder written by `datasets.save_to_disk`
    path: FilePath | list[FilePath]
    tokenizer: FilePath  # the model's tokenizer: a Hugging Face name, a folder or a .gguf file
    seq_length: Annotated[int, Interval(ge=1, le=2**30)]  # maximum number of tokens in a conversation
    # name of a template in configs/chat_templates, Jinja source, or a Jinja file; None: the tokenizer's own template
    chat_template: Text | None = None
    # maximum fraction of rows that may be dropped because they are malformed, too long or without a target
    max_dropped: Annotated[float, Interval(ge=0, le=1)] = 0.1
    # row keys that are not reported as unused: columns, or paths such as messages.name
    ignore_columns: list[str] = field(default_factory=list)


class ConversationDataset(Dataset):
    """Base class of datasets of rendered conversations; a sample has one or more conversations."""

    Options = ConversationOptions
    options: ConversationOptions
    row_documents = 1  # conversations per row of the input files
    preferences: ClassVar = False  # True: rows have good and bad answers

    @classmethod
    def tokenizer_of(cls, options: Any) -> str | None:
        return options.tokenizer

    @classmethod
    def prepare(cls, options: Any) -> None:
        """Render and tokenize the conversations once, into a cache folder."""
        for split in ("train", *cls.named_splits(options)):
            cls.prepared(options.of(split)[0])

    @classmethod
    def is_prepared(cls, options: Any) -> bool:
        for split in SPLITS:
            check_inputs(_paths(options.of(split)[0]))
        return False

    @classmethod
    def targets(cls, options: Any) -> TrainOn:
        """Return the messages of a conversation that are targets; by default, the last assistant turn."""
        return "last"

    @classmethod
    def prepared(cls, options: Any) -> Path:
        """Return the folder with the rendered conversations, and create it if needed.

        Raises DataError if too many rows are dropped.
        """
        tokenizer = load_with_template(options.tokenizer, options.chat_template)[1]
        folder = prepare_chat(
            ChatSource(_paths(options), tokenizer, cls.targets(options), options.seq_length, cls.preferences)
        )
        row_audit(folder, ()).check(" and ".join(_paths(options)), options.max_dropped)
        return folder

    def __init__(self, options: Any, split: Split) -> None:
        super().__init__(options, split)
        given, options = options, options.of(split)[0]
        self.tokenizer, self.tokenizer_path = load_with_template(options.tokenizer, options.chat_template)
        self.vocab_size, self.sequence_length = self.tokenizer.vocab_size, options.seq_length
        self.folder = self.prepared(options)
        said = row_audit(self.folder, options.ignore_columns).notices()
        self.notice = "; ".join([*said, f"see {self.folder / 'report.json'}"] if said else [])
        self.file = TokenFile(self.folder / "tokens")
        rows = given.rows(split, self.file.num_documents // self.row_documents, f"rows of {options.path}")
        special = [number for number, t in self.tokenizer.backend.get_added_tokens_decoder().items() if t.special]
        targets = (~ids[ids < 0] for ids in map(self.file.document, range(min(self.file.num_documents, 1000))))
        ends = {int(ids[np.isin(ids, special)][-1]) for ids in targets if np.isin(ids, special).any()}
        self.end_tokens = tuple(sorted({self.tokenizer.end_id} | ends))
        self.start, self.count = rows.start * self.row_documents, len(rows) * self.row_documents  # in conversations

    def tokens(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Return a conversation's tokens and targets; each target is the token itself or IGNORE_INDEX."""
        stored = self.file.document(self.start + number).astype(np.int64)
        return np.where(stored < 0, ~stored, stored), np.where(stored < 0, ~stored, IGNORE_INDEX)

    def __len__(self) -> int:
        return self.count // self.row_documents

    def numbers(self, index: int) -> list[int]:
        """Return the indices of a sample's conversations."""
        return [index]

    def location(self, index: int) -> str:
        places = _places(self.folder)
        return " and ".join(dict.fromkeys(places[self.start + number] for number in self.numbers(index)))


@registry.register_dataset("chat")
class Chat(ConversationDataset):
    """Conversations with the assistant's turns as targets; one conversation per sample, or several packed ones.

    input_ids, labels: int64 [length]. With `packing`, a sample has several complete conversations: position_ids
    restart at each conversation, and there is no attention between conversations.
    """

    @dataclass
    class Options(ConversationOptions):
        """Conversation options, targets and packing."""

        train_on: TrainOn = "assistant"  # turns to train on; last: the last assistant turn
        packing: bool = False  # True: pack several conversations into a sample, without attention between them

    options: Options

    @classmethod
    def targets(cls, options: Options) -> TrainOn:
        return options.train_on

    @classmethod
    def shapes(cls, options: Options) -> Batch:
        ids = torch.zeros(1, options.seq_length, dtype=torch.int64, device="meta")
        return {"input_ids": ids, "labels": ids} | ({"position_ids": ids} if options.packing else {})

    def __init__(self, options: Options, split: Split) -> None:
        super().__init__(options, split)
        self.documents = options.packing
        lengths = (self.file.sizes[self.start : self.start + self.count].astype(np.int64) - 1).tolist()
        self.packs = pack(lengths, options.seq_length) if options.packing else [[n] for n in range(self.count)]

    def __len__(self) -> int:
        return len(self.packs)

    def numbers(self, index: int) -> list[int]:
        return self.packs[index]

    def get(self, index: int, rng: np.random.Generator) -> Sample:
        parts = [self.tokens(number) for number in self.packs[index]]
        sample = {
            "input_ids": np.concatenate([ids[:-1] for ids, _ in parts]),
            "labels": np.concatenate([targets[1:] for _, targets in parts]),
        }
        if self.options.packing:
            sample["position_ids"] = np.concatenate([np.arange(len(ids) - 1) for ids, _ in parts])
        return sample

    def shorten(self, batch: Batch, length: int) -> Batch:
        return {key: tokens[:, :length] for key, tokens in batch.items()}

    def collate(self, samples: list[Sample]) -> Batch:
        return padded_rows(samples, self.options.seq_length)


def _paths(options: ConversationOptions) -> tuple[str, ...]:
    return (options.path,) if isinstance(options.path, str) else tuple(options.path)


@lru_cache(maxsize=4)
def _places(folder: Path) -> list[str]:
    return (folder / "places.txt").read_text(encoding="utf-8").split("\n")
