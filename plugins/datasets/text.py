"""Next-token prediction on tokenized documents, prepared by Crosstrain or Megatron-LM."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate
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
    EmptySplit,
    FilePath,
    OptionError,
    Sample,
    Split,
    SplitOptions,
    load_tokenizer,
    registry,
)
from crosstrain.data.tokenizer import cached_folder, load_gpt2

from ..commands.prepare.options import PrepareOptions
from ..commands.prepare.prepare import prepare
from ..commands.prepare.sources import sources
from .indexed_dataset import TokenFile
from .prepared import Summary, locate


@registry.register_dataset("text")
class TextDataset(Dataset):
    """Documents concatenated into one stream of tokens, cut into samples of `seq_length` tokens.

    Sample i has input_ids = tokens [i*S, i*S + S) of its split and labels = tokens [i*S + 1, i*S + S + 1), both
    int64 [S]; the last target is the next sample's first input. With `document_mask`, position_ids [S] restart at each
    document, attention does not cross documents, and the last token of a document has no target.
    """

    @dataclass
    class Options(SplitOptions):
        """Token files, their splits, and the sample length."""

        # path or URL of a prepared folder, or of a folder or prefix (data/meg-gpt2_text_document) of Megatron files
        path: FilePath
        seq_length: Annotated[int, Interval(ge=1, le=2**30)]  # tokens per sample
        # relative sizes of train, val and test, in documents; in tokens if there is only one document
        split: list[Annotated[float, Interval(ge=0, le=10**12)]] = field(
            default_factory=lambda: [949.0, 50.0, 1.0], kw_only=True
        )
        # path of the val split; None: a share of `path`
        val: FilePath | None = field(default=None, kw_only=True)
        test: FilePath | None = field(default=None, kw_only=True)  # path of the test split; None: a share of `path`
        # rounding of splits to whole documents; core: round the ends of splits, as in Megatron Core; legacy: round the
        # sizes of splits, as in older versions of Megatron-LM and in runs that predate this option
        split_rounding: Literal["core", "legacy"] = "core"
        document_mask: bool = False  # True: no attention between documents of a sample
        tokenizer: FilePath | None = None  # Hugging Face name or path; None: the prepared folder's tokenizer
        vocab_file: FilePath | None = None  # GPT-2's vocab.json; with merge_file, replaces `tokenizer`
        merge_file: FilePath | None = None  # GPT-2's merges.txt
        prepare: PrepareOptions | None = None  # prepare `path` if it does not exist; None: raise an error instead

        def __post_init__(self) -> None:
            super().__post_init__()
            if (self.vocab_file is None) != (self.merge_file is None):
                raise OptionError("vocab_file", "vocab_file and merge_file go together: give both, or neither")

    options: Options

    @classmethod
    def tokenizer_of(cls, options: Options) -> str | None:
        return options.prepare.tokenizer if options.prepare else options.tokenizer

    @classmethod
    def prepare(cls, options: Options) -> None:
        """Prepare `path` if it does not exist and `prepare` is given; cache the tokenizer once for all workers.

        Raises DataError if `path` was prepared with other options, or does not exist and `prepare` is not given.
        """
        if not cls.is_prepared(options):
            assert options.prepare is not None
            prepare(options.prepare, options.path, wait=True)
        for own in filter(None, (options.val, options.test)):
            locate(own)
        _, folder = locate(options.path)
        if folder and options.prepare and (changed := options.prepare.changed_from(Summary.read(folder).options)):
            key, then, now = changed
            raise DataError(
                f"{folder} was prepared with {key}={then!r}, but prepare.{key} is now {now!r}:"
                f" choose a different path, or remove the folder"
            )
        _tokenizer_folder(options.tokenizer, options.vocab_file, options.merge_file)

    @classmethod
    def is_prepared(cls, options: Options) -> bool:
        try:
            locate(options.path)
        except DataError:
            if options.prepare is not None:
                sources(options.prepare.input, {})  # `sources` raises DataError if an input is missing
            return options.prepare is None  # without `prepare`, there is nothing to create
        return True

    @classmethod
    def shapes(cls, options: Options) -> Batch:
        ids = torch.zeros(1, options.seq_length, dtype=torch.int64, device="meta")
        return {"input_ids": ids, "labels": ids} | ({"position_ids": ids} if options.document_mask else {})

    def __init__(self, options: Options, split: Split) -> None:
        super().__init__(options, split)
        self.sequence_length, self.documents = options.seq_length, options.document_mask
        self.options, share = options.of(split)
        prefix, folder = locate(self.options.path)
        self.file = TokenFile(prefix)
        self.far = self.file.remote
        self.eod_id: int | None = None
        if folder is not None:
            summary = Summary.read(folder)
            summary.check_tokenizer(folder)
            self.tokenizer_path = folder / "tokenizer"
            self.vocab_size, self.eod_id = summary.vocab_size, summary.eod_id
        if override := _tokenizer_folder(options.tokenizer, options.vocab_file, options.merge_file):
            self.tokenizer_path, self.vocab_size, self.eod_id = override
        self._num_ids = np.uint64(self.vocab_size or 2**63)
        self.start, self.stop = self._range(share)
        if len(self) < 1:
            tokens, own_files = self.stop - self.start, self.options is not options
            number = ("first", "second", "third")[SPLITS.index(split)]
            larger = "give it more text" if own_files else f"make the {number} number of split={options.split} larger"
            shorter = f" or seq_length at most {tokens - 1}" if tokens > 1 else ""
            raise EmptySplit(
                f"the {split} split of {self.options.path} has no sample: it gets {tokens} of {self.file.num_tokens}"
                f" tokens in {self.file.num_documents} documents, and one sample takes seq_length + 1 ="
                f" {options.seq_length + 1}",
                f"{larger}{shorter}, or add documents",
            )

    def _range(self, split: Split) -> tuple[int, int]:
        """Return the token range [first, end) of a split."""
        rounding = self.options.split_rounding
        parts, start = self.file.num_documents, self.file.document_start
        if rounding == "core":  # Megatron Core splits by sequences (a document may have several), not by documents
            parts, start = self.file.num_sequences, self.file.sequence_start
        if parts == 1:  # a single document is split by tokens
            parts, start = self.file.num_tokens, int
        first, last = split_bounds(self.options.split, parts, rounding)[SPLITS.index(split) :][:2]
        return start(first), start(last)

    def __len__(self) -> int:
        return max(self.stop - self.start - 1, 0) // self.options.seq_length

    def announce(self, indices: Sequence[int]) -> None:
        length = self.options.seq_length
        starts = [self.start + index * length for index in indices]
        self.file.announce([(start, start + length + 1) for start in starts])

    def get(self, index: int, rng: np.random.Generator) -> Sample:
        length = self.options.seq_length
        first = self.start + index * length
        tokens = self._tokens(first, first + length + 1)
        if not self.documents:
            return {"input_ids": tokens[:-1], "labels": tokens[1:]}
        starts = self.file.document_starts(first + 1, first + length + 1) - first
        labels, positions = tokens[1:].copy(), np.arange(length)
        labels[starts - 1] = IGNORE_INDEX
        for start in starts[starts < length]:
            positions[start:] = np.arange(length - start)
        return {"input_ids": tokens[:-1], "labels": labels, "position_ids": positions}

    def location(self, index: int) -> str:
        first = self.start + index * self.options.seq_length
        documents = [self.file.document_at(position) for position in (first, first + self.options.seq_length)]
        which = "documents {} to {}" if documents[0] < documents[1] else "document {}"
        return f"{which.format(*documents)} of {self.options.path}"

    def shorten(self, batch: Batch, length: int) -> Batch:
        return {key: tokens[:, :length] for key, tokens in batch.items()}

    def _tokens(self, start: int, stop: int) -> np.ndarray:
        """Return int64 tokens [start, stop) of the file. Raises DataError if a token is not in the vocabulary."""
        tokens = self.file.tokens(start, stop).astype(np.int64)
        if np.maximum.reduce(tokens.view(np.uint64)) >= self._num_ids:  # as uint64, a negative ID is at least 2^63
            low, high = tokens.min(), tokens.max()
            raise DataError(
                f"{self.file.bin_path} contains token {low if low < 0 else high}, but the tokenizer has ids 0 to"
                f" {(self.vocab_size or 0) - 1}: the file was made with a different tokenizer"
            )
        return tokens


def split_bounds(split: list[float], documents: int, rounding: str = "core") -> list[int]:
    """Return [0, end of train, end of val, end of test] in documents, rounded as in Megatron.

    core: round the cumulative shares, as in megatron/core/datasets/blended_megatron_dataset_builder.py. legacy: round
    the size of each split, then subtract the total rounding error from all three ends, like
    `get_train_valid_test_split_` in megatron/data/dataset_utils.py.
    """
    shares = [*split, 0.0, 0.0][:3]
    if rounding == "core":
        return [0, *(round(end * documents) for end in accumulate((np.array(shares) / np.sum(shares)).tolist()))]
    ends = list(accumulate(round(share / sum(split) * documents) for share in shares))
    error = ends[-1] - documents
    return [0, *(max(end - error, 0) for end in ends)]


@lru_cache(maxsize=4)
def _tokenizer_folder(
    tokenizer: str | None, vocab_file: str | None, merge_file: str | None
) -> tuple[Path, int, int] | None:
    """Return (folder, vocabulary size, end-of-text ID) of the given tokenizer; None if no tokenizer is given."""
    if vocab_file is not None and merge_file is not None:
        loaded = load_gpt2(vocab_file, merge_file)
    elif tokenizer is not None:
        loaded = load_tokenizer(tokenizer)
    else:
        return None
    return cached_folder(loaded), loaded.vocab_size, loaded.end_id
