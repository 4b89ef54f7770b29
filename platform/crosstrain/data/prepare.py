"""Documents to tokens: a folder that datasets of type `text` open at once.

tokens.bin, tokens.idx   Megatron's format; every document ends with the tokenizer's end-of-text token
tokenizer/               a Hugging Face tokenizer folder
dataset.json             what is inside and how it was made
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from tqdm import tqdm

from crosstrain.check import OptionError
from crosstrain.data import corpus
from crosstrain.data.tokenizer import TextTokenizer, load_tokenizer, train_bpe
from crosstrain.data.tokens import TokenWriter, best_dtype
from crosstrain.errors import DataError

FORMAT_VERSION = 1
_BATCH_CHARACTERS = 1 << 21  # enough for every core to have work, small enough to hold several times over
_log = logging.getLogger(__name__)


@dataclass
class PrepareOptions:
    """What to turn into tokens, and how."""

    input: str | list[str]  # "stdlib", or files and folders of .txt, .jsonl or .parquet
    text_key: str = "text"  # where a JSON line or a Parquet row keeps its text
    separator: str | None = None  # cuts a .txt file into documents; None: a file is a document
    tokenizer: str | None = None  # a Hugging Face name, a folder or a tokenizer.json ...
    train_tokenizer: int | None = None  # ... or the size of a byte-level BPE vocabulary to train on the input
    min_tokens: int = 0  # shorter documents are dropped

    def __post_init__(self) -> None:
        if (self.tokenizer is None) == (self.train_tokenizer is None):
            raise OptionError("tokenizer", "give either tokenizer (a name or a path) or train_tokenizer (a size)")


@dataclass
class Summary:
    """What `dataset.json` says."""

    format_version: int
    documents: int
    dropped: int  # documents shorter than min_tokens
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
            content = json.loads(path.read_text())
            if content.get("format_version") == FORMAT_VERSION:
                return cls(**{field.name: content[field.name] for field in fields(cls)})
        except (OSError, ValueError, KeyError, AttributeError) as error:
            raise DataError(f"{path} does not describe a prepared dataset: {error!r}; prepare it again") from None
        raise DataError(
            f"{path} has format version {content.get('format_version')}, and this version of Crosstrain reads"
            f" {FORMAT_VERSION}: prepare it again"
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

    Raises DataError when `output` exists (a dataset in it is replaced with `overwrite`, anything else never), when
    another process is making it (with `wait`: waits and returns what that process made), or when an input is missing,
    damaged or empty.
    """
    output = Path(output)
    output.parent.mkdir(parents=True, exist_ok=True)
    lock = output.with_name(f".{output.name}.lock")
    try:
        with FileLock(lock, timeout=-1 if wait else 0):
            if wait and (output / "dataset.json").exists():
                return Summary.read(output)
            summary = _replace(options, output, progress, overwrite)
            lock.unlink(missing_ok=True)  # whoever waits on it finds the finished dataset
            return summary
    except Timeout:
        raise DataError(f"another process is preparing {output}: wait for it, or choose another output") from None


def _replace(options: PrepareOptions, output: Path, progress: bool, overwrite: bool) -> Summary:
    occupied = output.exists() and not (output.is_dir() and not any(output.iterdir()))
    if occupied and not (output / "dataset.json").exists():
        raise DataError(f"{output} exists and is not a prepared dataset: choose another output")
    if occupied and not overwrite:
        raise DataError(f"{output} is prepared already: overwrite it explicitly or choose another output")
    partial, old = (output.with_name(f".{output.name}.{state}") for state in ("partial", "old"))
    shutil.rmtree(partial, ignore_errors=True)  # of a process that was killed: the lock says nobody is at it
    try:
        summary = _build(options, partial, progress)
        if occupied:
            shutil.rmtree(old, ignore_errors=True)
            output.rename(old)
        partial.rename(output)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    shutil.rmtree(old, ignore_errors=True)
    return summary


def _build(options: PrepareOptions, folder: Path, progress: bool) -> Summary:
    def documents() -> Iterator[str]:
        return corpus.documents(options.input, options.text_key, options.separator)

    if options.tokenizer is not None:
        tokenizer = load_tokenizer(options.tokenizer)
    else:
        assert options.train_tokenizer is not None
        tokenizer = train_bpe(documents(), options.train_tokenizer, progress)
        if tokenizer.vocab_size < options.train_tokenizer:
            _log.warning(
                "the text is too short for a vocabulary of %d: the tokenizer has %d",
                *(options.train_tokenizer, tokenizer.vocab_size),
            )
    tokenizer.save(folder / "tokenizer")
    dtype = best_dtype(tokenizer.vocab_size)
    with TokenWriter(folder / "tokens", dtype) as writer:
        text_bytes, dropped = _encode(documents(), tokenizer, writer, options.min_tokens, progress)
    if not writer.num_documents:
        raise DataError(f"all {dropped} documents of {options.input} are shorter than min_tokens={options.min_tokens}")
    summary = Summary(
        format_version=FORMAT_VERSION,
        documents=writer.num_documents,
        dropped=dropped,
        tokens=writer.num_tokens,
        text_bytes=text_bytes,
        vocab_size=tokenizer.vocab_size,
        eod_id=tokenizer.end_id,
        dtype=dtype.name,
        tokenizer_sha256=hashlib.sha256((folder / "tokenizer" / "tokenizer.json").read_bytes()).hexdigest(),
        options=asdict(options),
    )
    with open(folder / "dataset.json", "w") as file:
        file.write(json.dumps(asdict(summary), indent=2) + "\n")
        file.flush()
        os.fsync(file.fileno())
    return summary


def _encode(
    documents: Iterable[str], tokenizer: TextTokenizer, writer: TokenWriter, min_tokens: int, progress: bool
) -> tuple[int, int]:
    """(bytes of text, documents dropped) after writing every document's tokens."""
    text_bytes = dropped = 0
    end, started = tokenizer.end_id, time.monotonic()
    with tqdm(bar_format="{n_fmt} documents in {elapsed}{postfix}", disable=not progress) as bar:
        for texts in _batches(documents):
            encoded = tokenizer.encode_batch(texts)
            kept = [[*ids, end] for ids in encoded if len(ids) >= min_tokens]
            writer.add(kept)
            dropped += len(texts) - len(kept)
            text_bytes += sum(len(text) if text.isascii() else len(text.encode()) for text in texts)
            rate = text_bytes / 1e6 / (time.monotonic() - started)
            bar.set_postfix_str(f"{rate:.1f} MB/s, {writer.num_tokens:,} tokens", refresh=False)
            bar.update(len(texts))
    return text_bytes, dropped


def _batches(documents: Iterable[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    characters = 0
    for text in documents:
        batch.append(text)
        characters += len(text)
        if characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch
