"""Options of corpus preparation."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from annotated_types import Interval

from crosstrain.config.bounds import FilePath, NonNegativeInt, Text
from crosstrain.config.schema import Component, OptionError, to_plain


@dataclass
class NearOptions:
    """When two documents are the same but for details: by MinHash and banding, then by their true similarity."""

    # Jaccard similarity of their sets of shingles from which on the later one is dropped
    threshold: Annotated[float, Interval(gt=0, le=1)] = 0.8
    shingle: Annotated[int, Interval(ge=1, le=1000)] = 5  # units that follow one another
    unit: Literal["words", "characters"] = "words"  # characters for scripts that write no spaces
    # numbers in a signature: more find more surely, and take longer
    permutations: Annotated[int, Interval(ge=1, le=4096)] = 128


@dataclass
class DedupOptions:
    """Which documents are dropped because an earlier one, of whatever input, says the same."""

    exact: bool = True  # equal to the byte, after cleaning
    near: NearOptions | None = None  # almost equal; null: only equal ones


@dataclass
class PrepareOptions:
    """What to turn into tokens, and how."""

    # "stdlib", files and folders, or readers with their options
    input: Text | list[Text | Annotated[Component, "reader"]]
    text_key: Text = "text"  # where a JSON line or a Parquet row keeps its text
    separator: Text | None = None  # cuts a .txt file into documents; None: a file is a document
    clean: list[Annotated[Component, "processor"]] = field(default_factory=list)  # rules in this order
    dedup: DedupOptions | None = None  # drop repeated documents
    tokenizer: FilePath | None = None  # a Hugging Face name, a folder or a tokenizer.json ...
    # ... or the size of a byte-level BPE vocabulary to train on the input
    train_tokenizer: Annotated[int, Interval(ge=257, le=2**20)] | None = None
    min_tokens: NonNegativeInt = 0  # shorter documents are dropped
    downloads: FilePath | None = None  # a folder that keeps what is fetched; null: it goes when all is done
    # processes; None: one per core, or none but this for little input
    workers: Annotated[int, Interval(ge=1, le=1024)] | None = None

    def __post_init__(self) -> None:
        if (self.tokenizer is None) == (self.train_tokenizer is None):
            raise OptionError("tokenizer", "give either tokenizer (a name or a path) or train_tokenizer (a size)")

    @property
    def plain(self) -> dict[str, Any]:
        """What decides the result, as JSON holds it: not the number of workers, nor where downloads are kept."""
        found = to_plain(self)
        del found["workers"], found["downloads"]
        return found

    def changed_from(self, then: dict[str, Any]) -> tuple[str, Any, Any] | None:
        """(key, value then, value now) of the first option that decides the result and differs from `then`'s."""
        unset = PrepareOptions(input="", tokenizer="").plain  # of which an older version may not have known all
        for key, now in self.plain.items():
            if (before := then.get(key, unset[key])) != now:
                return key, before, now
        return None
