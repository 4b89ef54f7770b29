"""Documents to tokens: a folder that datasets of type `text` open at once.

tokens.bin, tokens.idx   Megatron's format; every document ends with the tokenizer's end-of-text token
tokenizer/               a Hugging Face tokenizer folder
dataset.json             what is inside and how it was made
report.json, lengths.svg what was read, kept and dropped, and why; how long the documents are
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Interval

from crosstrain.config.bounds import FilePath, NonNegativeInt, Text
from crosstrain.config.schema import Component, OptionError, to_plain
from crosstrain.utils.errors import DataError
from crosstrain.utils.files import read_regular
from crosstrain.utils.locks import locked

FORMAT_VERSION = 1
_MOST_BYTES = 1 << 26  # of dataset.json


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


@dataclass
class Summary:
    """What `dataset.json` says."""

    format_version: int
    documents: int
    dropped: int  # documents that were read and are not in it
    tokens: int  # with one end-of-text token per document
    text_bytes: int  # of the kept and the dropped documents, as UTF-8
    vocab_size: int
    eod_id: int
    dtype: str
    tokenizer_sha256: str  # of tokenizer/tokenizer.json
    options: dict[str, Any]  # the PrepareOptions it was made with

    @classmethod
    def read(cls, folder: Path) -> Summary:
        """Of a prepared folder. DataError when there is none, or one that this version cannot read."""
        path = folder / "dataset.json"
        try:
            content = json.loads(read_regular(path, _MOST_BYTES))
            if content.get("format_version") == FORMAT_VERSION:
                return cls(**{field.name: content[field.name] for field in fields(cls)})
        except (OSError, ValueError, KeyError, AttributeError) as error:
            raise DataError(f"{path} does not describe a prepared dataset: {error!r}; prepare it again") from None
        raise DataError(
            f"{path} has format version {content.get('format_version')}, and this version of Crosstrain reads"
            f" {FORMAT_VERSION}: prepare it again"
        )

    def differs(self, options: PrepareOptions) -> tuple[str, Any, Any] | None:
        """(key, value then, value now) of the first option that decides the result and is another one now."""
        unset = PrepareOptions(input="", tokenizer="").plain  # of which an older version may not have known all
        for key, value in options.plain.items():
            if (then := self.options.get(key, unset[key])) != value:
                return key, then, value
        return None

    def check_tokenizer(self, folder: Path) -> None:
        """DataError unless the tokenizer in a prepared folder is the one that made its tokens."""
        path = folder / "tokenizer" / "tokenizer.json"
        if not path.is_file() or hash_of(path) != self.tokenizer_sha256:
            raise DataError(
                f"{path} is not the tokenizer that made the tokens beside it (its SHA-256 differs from that in"
                f" {folder / 'dataset.json'}): put the original back, or prepare the data again"
            )

    def write(self, folder: Path) -> None:
        (folder / "dataset.json").write_text(json.dumps(asdict(self), indent=2) + "\n")


def hash_of(tokenizer: Path) -> str:
    """SHA-256 of a tokenizer.json, in hexadecimal."""
    return hashlib.sha256(tokenizer.read_bytes()).hexdigest()


def locate(where: str | Path) -> tuple[Path, Path | None]:
    """(prefix of the token files, the prepared folder if they are in one) at a path that names either.

    Raises DataError where there are no tokens, or several files of them.
    """
    path = Path(where).expanduser()
    if path.suffix in (".idx", ".bin"):
        path = path.with_suffix("")
    if (path / "dataset.json").exists():
        return path / "tokens", path
    if path.with_name(path.name + ".idx").exists():
        return path, None
    found = sorted(path.glob("*.idx"))
    if len(found) == 1:
        return found[0].with_suffix(""), None
    if found:
        raise DataError(f"{path} holds several token files ({', '.join(f.stem for f in found)}): path must name one")
    raise DataError(
        f"there are no tokens at {path}, neither a folder made by `crosstrain prepare` nor a Megatron prefix: run"
        f" `crosstrain prepare`, or say under `prepare` how to make it"
    )


def prepare(
    options: PrepareOptions,
    output: Path,
    progress: bool = True,
    *,
    overwrite: bool = False,
    wait: bool = False,
) -> Summary:
    """Make folder `output`, complete or not at all, and say what is in it.

    What is finished when the process is killed or fails stays in `<output>.partial`; the next call goes on from there,
    with the same result as if nothing had happened.

    Raises DataError when `output` exists (a dataset in it is replaced with `overwrite`, anything else never), when
    another process is making it (with `wait`: waits and returns what that process made), when an input is missing,
    damaged or gives no document, or when a disk is full.
    """
    output = Path(output)
    with making(output, wait=wait):
        if wait and (output / "dataset.json").exists():
            return Summary.read(output)
        return _replace(options, output, progress, overwrite)


@contextmanager
def making(output: Path, *, wait: bool = False) -> Iterator[None]:
    """Keep other processes from making the folder `output`. DataError where one is, or it cannot be made."""
    if output.name in ("", ".."):
        raise DataError(f"{output} cannot be replaced as a whole: choose another output")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with locked(output.with_name(f".{output.name}.lock"), wait=wait):
            yield
    except BlockingIOError:
        raise DataError(f"another process is preparing {output}: wait for it, or choose another output") from None
    except OSError as error:
        where = f": {error.filename}" if error.filename else ""
        raise DataError(f"{output} cannot be made ({error.strerror}{where})") from None


def _replace(options: PrepareOptions, output: Path, progress: bool, overwrite: bool) -> Summary:
    from crosstrain.corpus.pipeline import build

    replaceable(output, overwrite)
    partial = output.with_name(f"{output.name}.partial")
    try:
        summary = build(options, partial, progress)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        raise DataError(
            f"there is no room to write {error.filename or partial} ({error.strerror}): what is finished stays in"
            f" {partial}; make room and run the same command again to go on"
        ) from None
    finally:
        _remove_if_useless(partial)
    install(partial / "out", output)
    shutil.rmtree(partial, ignore_errors=True)
    return summary


def replaceable(output: Path, overwrite: bool) -> None:
    """DataError unless `output` is free, or a prepared dataset that may be overwritten."""
    if not os.path.lexists(output) or (output.is_dir() and not any(output.iterdir())):
        return
    if not (output / "dataset.json").exists():
        raise DataError(f"{output} exists and is not a prepared dataset: choose another output")
    if not overwrite:
        raise DataError(f"{output} is prepared already: overwrite it explicitly or choose another output")


def install(made: Path, output: Path) -> None:
    """Put the finished folder `made` in the place of `output`, which there may be."""
    old = output.with_name(f".{output.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if output.exists():
        output.rename(old)
    made.rename(output)
    shutil.rmtree(old, ignore_errors=True)


def _remove_if_useless(partial: Path) -> None:
    """Remove what a failure left behind if no finished shard is in it."""
    if partial.exists() and not (partial / "out").exists() and not any(partial.rglob("*.json")):
        shutil.rmtree(partial, ignore_errors=True)
