"""Options of corpus preparation."""

from dataclasses import dataclass, field, fields
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Interval

from crosstrain import Component, FilePath, Fraction, OptionError, Text, to_plain


@dataclass
class NearOptions:
    """Options for finding near-duplicates: MinHash signatures propose pairs, and their Jaccard similarity decides."""

    # minimum Jaccard similarity of two documents' shingles at which the later document is dropped
    threshold: Annotated[float, Interval(gt=0, le=1)] = 0.8
    shingle: Annotated[int, Interval(ge=1, le=1000)] = 5  # consecutive units in a shingle
    unit: Literal["words", "characters"] = "words"  # use characters for languages written without spaces
    # hash values in a signature; more values find more pairs and take longer
    permutations: Annotated[int, Interval(ge=1, le=4096)] = 128


@dataclass
class DedupOptions:
    """Options for dropping documents that repeat an earlier document of any input."""

    exact: bool = True  # drop documents that are byte-identical after filtering
    near: NearOptions | None = None  # also drop near-duplicates; None: keep them


@dataclass
class PrepareOptions:
    """Options of `crosstrain prepare`: the input, its filters and the tokenizer."""

    elsewhere: ClassVar = {"min_tokens": "`clean: [{name: document_length, min_tokens: N}]` drops short documents"}
    former: ClassVar = {"min_tokens": 0}

    # "stdlib", files and folders, or readers with their options
    input: Text | list[Text | Annotated[Component, "reader"]]
    text_key: Text = "text"  # key of the text in a JSON line, or column of the text in a table
    separator: Text | None = None  # text between documents of a .txt file; None: one document per file
    # records without usable text: drop (or skip) leaves them out and counts them, error stops at the first one
    unusable: Literal["error", "drop", "skip"] = "error"
    max_dropped: Fraction = 0.1  # largest fraction of an input's records that may be dropped as unusable
    ignore_columns: list[Text] = field(default_factory=list)  # columns that are not reported as unused
    clean: list[Annotated[Component, "processor"]] = field(default_factory=list)  # filters, applied in this order
    dedup: DedupOptions | None = None  # drop repeated documents; None: keep them
    tokenizer: FilePath | None = None  # a Hugging Face name, a folder or a tokenizer.json; None: use train_tokenizer
    # vocabulary size of a byte-level BPE to train on the input; None: use `tokenizer`
    train_tokenizer: Annotated[int, Interval(ge=257, le=2**20)] | None = None
    downloads: FilePath | None = None  # folder in which to keep downloads; None: remove them at the end
    # number of processes; None: one per core, or only the main process for a small input
    workers: Annotated[int, Interval(ge=1, le=1024)] | None = None

    def __post_init__(self) -> None:
        if (self.tokenizer is None) == (self.train_tokenizer is None):
            raise OptionError("tokenizer", "give either tokenizer (a name or a path) or train_tokenizer (a size)")

    @property
    def plain(self) -> dict[str, Any]:
        """The options that affect the result, as JSON: all except `workers` and `downloads`."""
        decides = {f.name for f in fields(PrepareOptions)} - {"workers", "downloads"}
        return {name: value for name, value in to_plain(self).items() if name in decides}

    def changed_from(self, then: dict[str, Any]) -> tuple[str, Any, Any] | None:
        """Return (key, old value, new value) of the first option in `plain` that differs from `then`, or None."""
        unset = PrepareOptions(input="", tokenizer="").plain  # defaults of options that an older version did not have
        for key, now in self.plain.items():
            if (before := then.get(key, unset[key])) != now:
                return key, before, now
        return None
