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
from crosstrain.data.chat import EncodeText, PromptBuilder
from crosstrain.data.shuffle import sample_index
from crosstrain.utils.errors import EmptySplit, UserError
from crosstrain.utils.types import Batch, Sample

Split = Literal["train", "val", "test"]
SPLITS: tuple[Split, ...] = ("train", "val", "test")


@dataclass(kw_only=True)
class SplitOptions:
    """Options for splits: either shares of the same files, or separate files that are used in full."""

    files: ClassVar[str] = "path"  # name of the option with the files to split
    # relative shares of train, val and test, in file order
    split: list[Annotated[float, Interval(ge=0, le=10**12)]] = field(default_factory=lambda: [1.0, 0.0, 0.0])
    val: FilePath | list[FilePath] | None = None  # files of the val split; None: a share of the train files (`split`)
    test: FilePath | list[FilePath] | None = None  # files of the test split; None: a share of the train files (`split`)

    def __post_init__(self) -> None:
        if not 1 <= len(self.split) <= 3 or not sum(self.split):
            raise OptionError(
                "split", f"must have one to three shares, not all 0, such as [95, 5, 0]; got {self.split}"
            )

    def of(self, split: Split) -> tuple[Self, Split]:
        """Return the options that describe a split's files, and the share of the files to read: train, val or test."""
        own = {"val": self.val, "test": self.test}.get(split)
        alone: dict[str, Any] = {self.files: own, "split": [1.0], "val": None, "test": None}
        return (replace(self, **alone), "train") if own else (self, split)

    def rows(self, split: Split, total: int, source: str) -> range:
        """Return the rows of a split as a range of the `total` rows in its files. Raises EmptySplit if it is empty.

        source: description of the rows and their files, for the error.
        """
        options, share = self.of(split)
        k, shares = SPLITS.index(share), [*options.split, 0.0, 0.0]
        rows = range(*(round(sum(shares[:n]) / sum(shares) * total) for n in (k, k + 1)))
        if not rows:
            own = f", or set {split} to files of its own" if split != "train" else ""
            raise EmptySplit(
                f"the {split} split contains none of the {total} {source}", f"change split={self.split}{own}"
            )
        return rows


class Dataset(ABC):
    """One split of a named dataset: a fixed number of samples, each reachable by its index.

    `crosstrain.data.shuffle` decides the order of samples. `get(index)` works for any index, in any order, from any
    process. Constructors of subclasses accept (options, split).
    """

    address: str = ""  # key in the project, such as datasets.chat; for error messages
    vocab_size: int | None = None  # upper bound of the token IDs; compared with the model's vocabulary
    sequence_length: int | None = None  # longest sample in tokens; checked against the model's limit
    tokenizer_path: Path | None = None  # folder of the tokenizer; the tokenizer files are copied into every checkpoint
    end_tokens: tuple[int, ...] = ()  # token IDs that end an answer; saved in a checkpoint's generation_config.json
    documents: bool = False  # True: position_ids restart at each document, which keeps documents in a sample separate
    row_layout: str | None = None  # layout of the rows of a sample, for an objective; None: rows are independent
    digest: str = ""  # hash of the samples' contents; identifies cached reference values of the samples
    reference: np.ndarray | None = None  # reference values [samples, rows]; `get` includes them as "reference"
    notice: str = ""  # a sentence to log at each start, for example about dropped rows
    far: bool = False  # True: samples are fetched remotely, so `announce` is called before `get`

    def __init__(self, options: Any, split: Split) -> None:
        self.options = options
        self.split = split

    @classmethod
    def open(cls, options: Any, split: Split) -> "Dataset":
        """Open a split. A subclass may return a different dataset that contains this one."""
        return cls(options, split)

    @classmethod  # noqa: B027 - most datasets have nothing to prepare
    def prepare(cls, options: Any) -> None:
        """Create the missing files that `options` describe.

        Usually called before workers start. Workers of an external launcher all call this method at once, so every
        call must give the same result, and later calls must wait for the first.
        """

    @classmethod
    def is_prepared(cls, options: Any) -> bool:
        """Return True if `prepare` has nothing to create, so that a dry run may open the data.

        This method must not write anything. The default is True if `prepare` is not overridden. Raises DataError if an
        input of `prepare` is missing.
        """
        return cls.prepare.__func__ is Dataset.prepare.__func__  # type: ignore[attr-defined]

    @classmethod
    def named_splits(cls, options: Any) -> list[Split]:
        """Return the splits for which `options` name separate files, as in `SplitOptions`.

        If the test split has separate files, training evaluates the test split at the end.
        """
        if not isinstance(options, SplitOptions):
            return []
        named: dict[Split, Any] = {"val": options.val, "test": options.test}
        return [split for split, files in named.items() if files]

    @classmethod
    def tokenizer_of(cls, options: Any) -> str | None:
        """Return the name or path of the tokenizer that `prepare` will use; None for data without a tokenizer."""
        return None

    @classmethod
    def prompt_builder(cls, options: Any, tokenizer: Path, encode: EncodeText | None = None) -> PromptBuilder:
        """Make the prompt builder for a model trained on a dataset with these options. The data need not exist.

        tokenizer: folder of a checkpoint's tokenizer. encode: function to use instead of this tokenizer.
        Raises UserError if the dataset has no conversations, or if it formats them with the tokenizer's chat template.
        The default always raises UserError.
        """
        raise UserError(f"{cls.__name__} has no conversation format, so it does not support questions about files")

    @classmethod
    def shapes(cls, options: Any) -> Batch | None:
        """Return a batch of one sample of maximum length, on the meta device, without opening the data.

        Used for planning. Returns None if the shapes are unknown until the data exists; the default returns None.
        """
        return None

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of samples in this split."""

    @abstractmethod
    def get(self, index: int, rng: np.random.Generator) -> Sample:
        """Return sample `index` (0 <= index < len(self)).

        `rng`, the only source of randomness allowed, depends on the run's seed and on the sample number in the run,
        so augmentation does not depend on the number of workers or on resumes.
        """

    def announce(self, indices: Sequence[int]) -> None:  # noqa: B027 - most have nothing to fetch
        """Start fetching samples that will be read soon in this process. A sample may be announced repeatedly."""

    def training_index(self, seed: int, number: int) -> int:
        """Return the index of training sample `number` of a run; by default from a new shuffle every epoch."""
        return sample_index(seed, number, len(self))

    def evaluation_index(self, place: int) -> int:
        """Return the index of the sample at position `place` of a partial evaluation; by default `place`."""
        return place

    def location(self, index: int) -> str:
        """Return a readable location of sample `index`, such as a file and line; empty by default."""
        return ""

    def shorten(self, batch: Batch, length: int) -> Batch:
        """Return the first `length` tokens of every sample of a batch. Raises UserError by default."""
        raise UserError(f"run.curriculum: samples of {type(self).__name__} cannot be shortened; remove the option")

    def collate(self, samples: list[Sample]) -> Batch:
        """Make a batch of samples. By default, arrays of equal shape are stacked."""
        return default_collate(samples)
