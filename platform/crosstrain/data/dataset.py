"""What a dataset owes the platform."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from torch.utils.data import default_collate

from crosstrain.data.shuffle import sample_index
from crosstrain.utils.errors import UserError
from crosstrain.utils.types import Batch, Sample

Split = Literal["train", "val", "test"]
SPLITS: tuple[Split, ...] = ("train", "val", "test")


@dataclass(frozen=True)
class ReadContext:
    """Who reads a split in a run, and from where on."""

    seed: int
    start: int  # number of the run's first sample: not 0 after a resume
    rank: int  # of the data-parallel ranks
    size: int


class Dataset(ABC):
    """One split of a named dataset: a fixed number of samples, each reachable by its index.

    Which sample comes next is not a dataset's business (`crosstrain.data.shuffle` decides); it answers `get(index)`
    for any index, in any order, from any process.
    """

    @dataclass
    class Options:
        """A dataset without options of its own."""

    vocab_size: int | None = None  # ids in samples are below this; checked against the model's
    sequence_length: int | None = None  # longest sample in tokens; checked against the model's limit
    tokenizer_path: Path | None = None  # a folder; its tokenizer's files are copied into every checkpoint
    indexed: bool = True  # False: `get` gives the next sample of a stream, whatever index it is asked for

    # Subclasses accept (options, split) and keep what they need.
    def __init__(self, options: Any, split: Split) -> None:
        self.options = options
        self.split = split

    @classmethod  # noqa: B027 - most datasets have nothing to prepare
    def prepare(cls, options: Any) -> None:
        """Make what `options` say exists but does not yet.

        Called before any worker starts; by every worker where something else started them, so that calls at the same
        time must come to one result, the later ones waiting for the first.
        """

    def begin(self, context: ReadContext) -> None:  # noqa: B027 - most datasets have nothing to begin
        """Called in every process of a run before the first sample is asked for.

        A dataset that has each sample at its index need not know who asks; one that reads a stream must.
        """

    @classmethod
    def shapes(cls, options: Any) -> Batch | None:
        """A batch of one sample as long as samples get, on the meta device; the data need not be there.

        For the plan. None, the default: not known before the data is there.
        """
        return None

    @abstractmethod
    def __len__(self) -> int:
        """Number of samples in this split."""

    @abstractmethod
    def get(self, index: int, rng: np.random.Generator) -> Sample:
        """Sample `index` (0 <= index < len(self)).

        `rng` is the only source of randomness allowed: it depends on the run's seed and the sample's number, so
        augmentation is the same for any number of workers and after any resume.
        """

    def training_index(self, seed: int, number: int) -> int:
        """The index that training sees as sample `number` of a run: by default a new shuffle of all every epoch."""
        return sample_index(seed, number, len(self))

    def location(self, index: int) -> str:
        """Where a person finds sample `index`: a file, a place in it. Empty, the default: the index says it all."""
        return ""

    def evaluation_index(self, place: int) -> int:
        """The index that an evaluation sees at `place` where it does not take all; by default the file's order."""
        return place

    def shorten(self, batch: Batch, length: int) -> Batch:
        """The first `length` tokens of every sample of a batch. UserError, the default, where that makes no sense."""
        raise UserError(f"samples of {type(self).__name__} cannot be shortened, as run.curriculum asks: leave it out")

    def collate(self, samples: list[Sample]) -> Batch:
        """Batch of samples; the default stacks arrays of equal shape."""
        return default_collate(samples)

    def baselines(self) -> dict[str, float]:
        """Perplexities that need no training, by name, to hold a trained model against. None by default."""
        return {}
