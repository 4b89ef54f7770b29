"""Options of corpus preparation."""

from dataclasses import dataclass, field, fields
from typing import Annotated, Any, Literal

from annotated_types import Interval

from crosstrain import Component, FilePath, Fraction, NonNegativeInt, OptionError, Text
from crosstrain.config.schema import to_plain


@dataclass
class NearOptions:
    """Options of finding near-duplicates, by MinHash and banding and then by their true similarity."""

    # least Jaccard similarity of two documents' sets of shingles for which the later one is dropped
    threshold: Annotated[float, Interval(gt=0, le=1)] = 0.8
    shingle: Annotated[int, Interval(ge=1, le=1000)] = 5  # consecutive units
    unit: Literal["words", "characters"] = "words"  # characters for scripts that write no spaces
    # numbers in a signature: more find more pairs, and take longer
    permutations: Annotated[int, Interval(ge=1, le=4096)] = 128


@dataclass
class DedupOptions:
    """Options of dropping documents that repeat an earlier one, of any input."""

    exact: bool = True  # equal to the byte, after filtering
    near: NearOptions | None = None  # almost equal; null: only equal ones


@dataclass
class PrepareOptions:
    """Options of `crosstrain prepare`: the input, and the way to its tokens."""

    # "stdlib", files and folders, or readers with their options
    input: Text | list[Text | Annotated[Component, "reader"]]
    text_key: Text = "text"  # where a JSON line or a Parquet row keeps its text
    separator: Text | None = None  # cuts a .txt file into documents; None: a file is a document
    # records without usable text: drop (or skip) counts and leaves them out, error stops at the first
    unusable: Literal["error", "drop", "skip"] = "error"
    max_dropped: Fraction = 0.1  # largest share of an input's records that may be dropped as unusable
    ignore_columns: list[Text] = field(default_factory=list)  # columns beside the text whose loss is intended
    clean: list[Annotated[Component, "processor"]] = field(default_factory=list)  # filters in this order
    dedup: DedupOptions | None = None  # drop repeated documents
    tokenizer: FilePath | None = None  # a Hugging Face name, a folder or a tokenizer.json
    # size of a byte-level BPE vocabulary to train on the input, instead of `tokenizer`
    train_tokenizer: Annotated[int, Interval(ge=257, le=2**20)] | None = None
    min_tokens: NonNegativeInt = 0  # shorter documents are dropped
    downloads: FilePath | None = None  # a folder that keeps downloads; null: they are removed at the end
    # processes; None: one per core, or none but this for little input
    workers: Annotated[int, Interval(ge=1, le=1024)] | None = None

    def __post_init__(self) -> None:
        if (self.tokenizer is None) == (self.train_tokenizer is None):
            raise OptionError("tokenizer", "give either tokenizer (a name or a path) or train_tokenizer (a size)")

    @property
    def plain(self) -> dict[str, Any]:
        """The options that decide the result, as JSON: all but where the work is done, and the folder of downloads."""
        decides = {f.name for f in fields(PrepareOptions)} - {"workers", "downloads"}
        return {name: value for name, value in to_plain(self).items() if name in decides}

    def changed_from(self, then: dict[str, Any]) -> tuple[str, Any, Any] | None:
        """Return (key, value then, value now) of the first option in `plain` that differs from `then`; None if none."""
        unset = PrepareOptions(input="", tokenizer="").plain  # for options that an older version did not have
        for key, now in self.plain.items():
            if (before := then.get(key, unset[key])) != now:
                return key, before, now
        return None
