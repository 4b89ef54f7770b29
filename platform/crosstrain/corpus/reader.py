"""What a reader owes the platform: chunks of work that can be read apart, and the documents in each."""

from __future__ import annotations

import hashlib
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from crosstrain.config.bounds import Text
from crosstrain.corpus import io
from crosstrain.corpus.download import download, is_url
from crosstrain.utils.errors import DataError

TASK_BYTES = 8 << 20  # of input in a task: large enough to be worth a file of its own, small enough to be held


@dataclass(frozen=True)
class Document:
    """A text and where it was found, such as `dump/part-3.jsonl:17`."""

    text: str
    source: str


@dataclass(frozen=True)
class Chunk:
    """Bytes [start, stop) of the content of a file; `data` holds them where they cannot be sought.

    Of a compressed file without `data` it is the whole content, and start and stop are those of the file.
    """

    file: Path
    start: int
    stop: int
    data: bytes | None = field(default=None, repr=False)

    def read(self) -> bytes:
        """The bytes. DataError where the file cannot be read."""
        if self.data is not None:
            return self.data
        if io.is_compressed(self.file):
            return io.read_all(self.file)
        return io.read_range(self.file, self.start, self.stop)


@dataclass(frozen=True)
class Task:
    """Input that one worker reads in one go, and that is done again if it did not get to its end.

    key: changes with whatever would change the documents in it, other than the reader's options.
    size: bytes of input, for the progress bar. payload: what `Reader.read` needs; it is pickled.
    """

    key: str
    size: int
    payload: Any = field(repr=False)


def check_column(table: object, names: list[str], column: str) -> None:
    """DataError unless `column` is among a table's; `table` is what people know it by."""
    if column not in names:
        raise DataError(f"{table} has no column {column!r}; it has {', '.join(names)}: set text_key")


def cell(table: object, column: str, row: int, value: object) -> Document:
    """The document of a row, where null is an empty text. DataError for anything else that is no text."""
    if value is not None and not isinstance(value, str):
        raise DataError(f"column {column!r} of {table} holds {type(value).__name__}, not text (row {row})")
    return Document(value or "", f"{table}, row {row}")


class Reader(ABC):
    """Turns one kind of input into documents. Made from its options in every process that reads.

    `tasks` runs once, in the process that leads, and may hand out the raw records themselves where nobody else could
    find them, as in a compressed file; `read` runs in the workers and does what takes long.
    """

    suffixes: ClassVar[tuple[str, ...]] = ()  # endings of the files that it reads where no reader is named
    shared_options: ClassVar[tuple[str, ...]] = ()  # options that a recipe sets for all its readers

    @dataclass
    class Options:
        """A reader without options of its own needs no path: its name alone is an input."""

    account: dict[str, int]  # what `fetch` has to tell: how many of what, for the report

    def __init__(self, options: Any) -> None:
        self.options = options
        self.account = {}

    @classmethod
    def claims(cls, path: Path) -> bool:
        """Whether a file or folder is one for this reader."""
        return path.is_file() and io.plain_name(path).lower().endswith(cls.suffixes or ("\0",))

    def fetch(self, folder: Path, progress: bool) -> None:  # noqa: B027 - most have nothing to fetch
        """Bring what is not here yet into `folder`, which outlives the process; called before `tasks`."""

    def size(self) -> int | None:
        """Bytes of all tasks, where that is known without reading them."""
        return None

    @abstractmethod
    def tasks(self) -> Iterator[Task]:
        """All input in an order that never varies. DataError for what is missing or holds nothing."""

    @abstractmethod
    def read(self, task: Task) -> Iterator[Document]:
        """The documents of a task in order. DataError, saying where, for what is damaged."""


class FileReader(Reader):
    """Reads files, each cut into chunks. Its options have a `path`: a file, a folder or several of them."""

    @dataclass
    class Options:
        """What to read."""

        path: Text | list[Text]  # files, folders that are searched for such files, and URLs of files

    found: list[Path] | None = None  # the files, where whoever made the reader has looked for them already
    fetched: Path | None = None  # the folder of what came from URLs

    def fetch(self, folder: Path, progress: bool) -> None:
        self.fetched = folder
        for item in filter(is_url, self._named()):
            download(item, folder, progress)

    def _named(self) -> list[str]:
        return [self.options.path] if isinstance(self.options.path, str) else self.options.path

    def files(self) -> list[Path]:
        """The files that the options name, those of a folder sorted by path."""
        if self.found is not None:
            return self.found
        found: list[Path] = []
        for item in self._named():
            if is_url(item):
                assert self.fetched is not None
                found.append(download(item, self.fetched, False))
                continue
            path = io.existing(item)
            inside = [file for file in io.files_below(path) if self.claims(file)] if path.is_dir() else [path]
            if not inside:
                raise io.nothing_in(path, "/".join(self.suffixes))
            found += inside
        return found

    def chunks(self, file: Path) -> Iterator[Chunk]:
        """How a file is cut; by default not at all."""
        yield Chunk(file, 0, file.stat().st_size)

    @abstractmethod
    def read_chunk(self, chunk: Chunk) -> Iterator[Document]:
        """The documents of a chunk in order."""

    def size(self) -> int | None:
        files = self.files()
        return None if any(map(io.is_compressed, files)) else sum(file.stat().st_size for file in files)

    def tasks(self) -> Iterator[Task]:
        """Chunks of about `TASK_BYTES`; small files share a task."""
        batch: list[Chunk] = []
        size = 0
        for file in self.files():
            for chunk in self.chunks(file):
                if batch and size + chunk.stop - chunk.start > TASK_BYTES:
                    yield _task(batch, size)
                    batch, size = [], 0
                batch.append(chunk)
                size += chunk.stop - chunk.start
        if batch:
            yield _task(batch, size)

    def read(self, task: Task) -> Iterator[Document]:
        for chunk in task.payload:
            yield from self.read_chunk(chunk)


def _task(chunks: list[Chunk], size: int) -> Task:
    key = hashlib.blake2b(digest_size=16)
    for chunk in chunks:
        state = chunk.file.stat()
        key.update(
            os.fsencode(f"{chunk.file}\0{state.st_size}\0{state.st_mtime_ns}\0{chunk.start}\0{chunk.stop}\0")
        )
    return Task(key.hexdigest(), size, chunks)
