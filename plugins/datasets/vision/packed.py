"""Pack the samples of an image dataset into rows, by their numbers of visual and text tokens."""

from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from crosstrain import Batch, DataError, Example, Sample, SampleError, cache_folder
from crosstrain.utils.forks import CheckedForkContext

from ...commands.prepare.pool import cores
from ...commands.prepare.prepare import output_lock
from ...commands.prepare.shards import key_of
from ..packing import pack
from .image_dataset import ImageDataset, VqaDataset
from .processor_encoder import joined

_FORMAT = 1  # version of the lengths' files; changing it measures again
_MANY = 1000  # samples; with fewer, starting processes takes longer than the work


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


class _Lengths(torch.utils.data.Dataset):
    """Numbers of tokens of samples; 0 for unusable ones."""

    def __init__(self, rows: ImageDataset) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> int:
        try:
            return len(usable_sample(self.rows, index)["input_ids"])
        except SampleError:
            return 0


def measured(rows: ImageDataset) -> np.ndarray:
    """Return the numbers of tokens [samples], 0 for unusable ones; they are measured unless they are in the cache."""
    path = cache_folder("lengths") / f"{key_of(_FORMAT, rows.state())[:16]}.npy"
    with output_lock(path, wait=True):
        if path.exists():
            return np.load(path, allow_pickle=False)
        workers = cores() if len(rows) > _MANY else 0
        context = CheckedForkContext() if workers else None
        loader: Any = DataLoader(_Lengths(rows), None, num_workers=workers, multiprocessing_context=context)
        lengths = np.fromiter(map(int, loader), np.int64, len(rows))
        partial = path.with_suffix(".partial.npy")
        np.save(partial, lengths)
        partial.rename(path)
    return lengths
