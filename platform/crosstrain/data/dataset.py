"""The interface of a dataset plugin."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

import numpy as np
from annotated_types import Interval
from torch.utils.data import default_collate

from crosstrain.config.bounds import FilePath
from crosstrain.config.schema import OptionError
from crosstrain.data.shuffle import sample_index
from crosstrain.utils.errors import EmptySplit, UserError
from crosstrain.utils.types import Batch, Sample

Split = Literal["train", "val", "test"]
SPLITS: tuple[Split, ...] = ("train", "val", "test")


@dataclass(frozen=True)
class ReadContext:
    """The rank that reads a split in a run, and its first sample."""

    seed: int
    start: int  # number of the run's first sample: not 0 after a resume
    rank: int  # of the data-parallel ranks
    size: int


@dataclass(kw_only=True)
class SplitOptions:
    """Shares of the splits, or files of their own, which are read as a whole."""

    files: ClassVar[str] = "path"  # the option that names the files to share
    # shares of train, val, test, in file order
    split: list[Annotated[float, Interval(ge=0, le=10**12)]] = field(default_factory=lambda: [1.0, 0.0, 0.0])
    val: FilePath | list[FilePath] | None = None  # files of the split, in place of a share of the others
    test: FilePath | list[FilePath] | None = None  # files of the split

    def __post_init__(self) -> None:
        if not 1 <= len(self.split) <= 3 or not sum(self.split):
            raise OptionError("split", f"must be up to three shares such as [95, 5, 0], not {self.split}")

    def of(self, split: Split) -> tuple[Self, Split]:
        """Return the options that name the files of a split, and the share of these to read."""
        own = {"val": self.val, "test": self.test}.get(split)
        alone: dict[str, Any] = {self.files: own, "split": [1.0], "val": None, "test": None}
        return (replace(self, **alone), "train") if own else (self, split)

    def rows(self, split: Split, total: int, source: str) -> range:
        """Return the rows of a split, of `total` rows in its files, called `source`. EmptySplit if there is none."""
        options, share = self.of(split)
        k, shares = SPLITS.index(share), [*options.split, 0.0, 0.0]
        rows = range(*(round(sum(shares[:n]) / sum(shares) * total) for n in (k, k + 1)))
        if not rows:
            own = f", or name files as {split}" if split != "train" else ""
            raise EmptySplit(f"the {split} split has none of the {total} {source}", f"change split={self.split}{own}")
        return rows


class Dataset(ABC):
    """One split of a named dataset: a fixed number of samples, each reachable by its index.

    `crosstrain.data.shuffle` decides the order of samples. A dataset answers `get(index)` for any index, in any order,
    from any process. Subclasses accept (options, split).
    """

    address: str = ""  # where a project describes it, such as datasets.chat; errors name it
    vocab_size: int | None = None  # bound of the ids in samples; checked against the model's
    sequence_length: int | None = None  # longest sample in tokens; checked against the model's limit
    image_sizes: frozenset[tuple[int, int]] = frozenset()  # height and width of its images; checked against the model's
    tokenizer_path: Path | None = None  # a folder; its tokenizer's files are copied into every checkpoint
    end_tokens: tuple[int, ...] = ()  # that end an answer; a checkpoint's generation_config.json names them
    documents: bool = False  # True: position_ids, which restart at each document, keep the documents of a sample apart
    row_layout: str | None = None  # how the rows of a sample belong together, for an objective; None: each by itself
    digest: str = ""  # of what the samples are, where an objective measures them once for all runs
    reference: np.ndarray | None = None  # measured numbers [samples, rows], which `get` then gives as "reference"
    notice: str = ""  # a sentence on its files that a user should see at each start, such as on rows left out
    far: bool = False  # True: samples come from elsewhere, so `announce` is called before `get`
    indexed: bool = True  # False: `get` gives the next sample of a stream and ignores the index

    def __init__(self, options: Any, split: Split) -> None:
        self.options = options
        self.split = split

    @classmethod  # noqa: B027 - most datasets have nothing to prepare
    def prepare(cls, options: Any) -> None:
        """Make missing files that `options` describe.

        Called before any worker starts. Workers that something else started call it all at once: the calls must come
        to one result, the later ones waiting for the first.
        """

    @classmethod
    def is_prepared(cls, options: Any) -> bool:
        """Tell whether `prepare` has nothing to make, so that a dry run may call it and open the data; writes nothing.

        By default True if `prepare` is not overridden. Raises DataError where it would lack an input.
        """
        return cls.prepare.__func__ is Dataset.prepare.__func__  # type: ignore[attr-defined]

    @classmethod
    def named_splits(cls, options: Any) -> list[Split]:
        """Return the splits that `options` name files for, as `SplitOptions` has them.

        Training evaluates a named test split at its end.
        """
        if not isinstance(options, SplitOptions):
            return []
        named: dict[Split, Any] = {"val": options.val, "test": options.test}
        return [split for split, files in named.items() if files]

    @classmethod
    def tokenizer_of(cls, options: Any) -> str | None:
        """Return the name or path of the tokenizer that `prepare` will use; None for data without one."""
        return None

    def begin(self, context: ReadContext) -> None:  # noqa: B027 - only streams need to know
        """Get ready to read; called in every process of a run before the first sample."""

    @classmethod
    def shapes(cls, options: Any) -> Batch | None:
        """Return a batch of one sample of the greatest length, on the meta device, without opening the data.

        For the plan. None, the default, if it is not known before the data is there.
        """
        return None

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of samples in this split."""

    @abstractmethod
    def get(self, index: int, rng: np.random.Generator) -> Sample:
        """Return sample `index` (0 <= index < len(self)).

        `rng` is the only source of randomness allowed. It depends on the run's seed and the sample's number, so
        augmentation is the same for any number of workers and after any resume.
        """

    def announce(self, indices: Sequence[int]) -> None:  # noqa: B027 - most have nothing to fetch
        """Begin to fetch samples that will be asked for soon, in this process; some may be announced again."""

    def training_index(self, seed: int, number: int) -> int:
        """Return the index of a run's sample `number` in training; by default from a new shuffle every epoch."""
        return sample_index(seed, number, len(self))

    def evaluation_index(self, place: int) -> int:
        """Return the index of sample `place` of an evaluation of a part of the split; by default `place`."""
        return place

    def location(self, index: int) -> str:
        """Return the place of sample `index` for a person, such as a file and line; empty, the default, for none."""
        return ""

    def normalization(self, index: int) -> tuple[Sequence[float], Sequence[float]] | None:
        """Return the mean and deviation, by channel, that a sample's pixels are normalized by; None: not known."""
        return None

    def shorten(self, batch: Batch, length: int) -> Batch:
        """Return the first `length` tokens of every sample of a batch. UserError, the default, if that is senseless."""
        raise UserError(f"samples of {type(self).__name__} cannot be shortened, as run.curriculum asks: leave it out")

    def collate(self, samples: list[Sample]) -> Batch:
        """Make a batch of samples; by default arrays of equal shape are stacked."""
        return default_collate(samples)

    def baselines(self) -> dict[str, float]:
        """Return perplexities of simple models without training, by name; none by default."""
        return {}
