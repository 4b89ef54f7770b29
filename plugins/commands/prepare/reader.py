"""The interface of reader plugins: a reader cuts its input into tasks, and reads the documents of each task.

`split_file` cuts large files between records: lines, pages, or other units separated by a byte string.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from crosstrain import DataError, Text
from crosstrain.utils.storage import is_url

from ...datasets.row_audit import RowAudit
from . import io
from .download import download

TASK_BYTES = 8 << 20  # input bytes per task: enough to be worth a separate file, and few enough to fit in memory


@dataclass(frozen=True)
class Document:
    """A text and its source, such as `dump/part-3.jsonl:17`.

    unread: names of columns, templates or other parts of the record that the reader left out.
    """

    text: str
    source: str
    unread: tuple[str, ...] = ()


@dataclass(frozen=True)
class Chunk:
    """Bytes [start, stop) of the content of a file; `data` holds them if the file is not seekable.

    If a chunk of a compressed file has no `data`, it is the whole content; start and stop then count compressed bytes.
    """

    file: Path
    start: int
    stop: int
    data: bytes | None = field(default=None, repr=False)

    def read(self) -> bytes:
        """Return the bytes. Raises DataError if the file cannot be read."""
        if self.data is not None:
            return self.data
        with io.opened(self.file) as stream:
            if io.is_compressed(self.file):
                return stream.read()
            stream.seek(self.start)
            return stream.read(self.stop - self.start)

    def text(self) -> str:
        """Decode the bytes as UTF-8, without the byte order mark. `FileReader.read` handles invalid bytes."""
        return self.read().decode(errors="surrogateescape").lstrip("" if self.start else "\ufeff")


def check_column(table: object, names: list[str], column: str) -> None:
    """Raise DataError unless `column` occurs exactly once among the column names of a table."""
    if names.count(column) > 1:
        raise DataError(f"{table} has {names.count(column)} columns {column!r}: rename all but one")
    if column not in names:
        raise DataError(f"{table} has no column {column!r}; it has {', '.join(names)}: set text_key")


def row_document(value: Any, source: str, names: Iterable[str], key: str) -> Document:
    """Return the document of a row. value: the row's text, or None for an empty text. key: the column of the text."""
    return Document("" if value is None else value, source, tuple(name for name in names if name != key))


def flaw(text: object) -> str:
    """Return the reason why a tokenizer cannot encode a value, or an empty string."""
    if not isinstance(text, str):
        return f"holds {type(text).__name__}, not text"
    if (place := text.find("\0")) >= 0:
        return f"holds a NUL character, which text does not contain, after {text[max(0, place - 20) : place]!r}"
    try:
        text.encode()
    except UnicodeEncodeError as error:  # an invalid byte, or a lone surrogate
        return f"is not UTF-8 text: invalid at byte {len(text[: error.start].encode())}, as {text[error.start]!r}"
    return ""


class FileReader(ABC):
    """A reader of one kind of file. Every process that reads creates its own instance from the options.

    `tasks` runs once, in the main process. A task contains raw records if workers cannot seek to the records, as in a
    compressed file. `read` runs in the workers and does the slow part.
    """

    @dataclass
    class Options:
        """Files to read."""

        path: Text | list[Text]  # files, URLs of files, and folders to search for files

    suffixes: ClassVar[tuple[str, ...]] = ()  # file suffixes for which this reader is the default
    contents: ClassVar[tuple[str, ...] | None] = None  # accepted kinds, as returned by `io.kind_of`; None: any kind

    known_files: Sequence[Path] | None = None  # the files, if a search has already found them
    drops: RowAudit | None = None  # counts unusable records; None: an unusable record is an error
    chosen_by_ending = False  # True: chosen by file suffix, so the content of files is checked

    def __init__(self, options: Any) -> None:
        self.options = options
        self.fetch_counts: dict[str, int] = {}  # name -> count, set by `fetch` for the report
        self.fetched: dict[str, Path] = {}  # URL -> downloaded file

    @property
    def _paths(self) -> list[str]:
        return [self.options.path] if isinstance(self.options.path, str) else self.options.path

    def fetch(self, folder: Path, progress: bool) -> None:
        """Download missing input into `folder`, which outlives the process. Called before `tasks`."""
        self.fetched = {item: download(item, folder, progress) for item in self._paths if is_url(item)}

    def files(self) -> Sequence[Path]:
        """List the files that the options name; the files of a folder are sorted by path."""
        if self.known_files is not None:
            return self.known_files
        found: list[Path] = []
        for item in self._paths:
            path = self.fetched.get(item) or io.existing(item)
            inside = (
                [file for file in io.files_below(path) if io.has_suffix(file, self.suffixes)]
                if path.is_dir()
                else [path]
            )
            if not inside:
                raise io.nothing_in(path, "/".join(self.suffixes))
            found += inside
        return found

    def chunks(self, file: Path) -> Iterator[Chunk]:
        """Cut a file into chunks; by default, the whole file is one chunk."""
        yield Chunk(file, 0, file.stat().st_size)

    @abstractmethod
    def read_chunk(self, chunk: Chunk) -> Iterator[Document]:
        """Yield the documents of a chunk in order. Raises DataError, with the location, if the input is damaged."""

    def size(self) -> int | None:
        """Return the total size of all tasks in bytes; None if it is unknown before reading."""
        files = self.files()
        return None if any(map(io.is_compressed, files)) else sum(file.stat().st_size for file in files)

    def tasks(self) -> Iterator[list[Chunk]]:
        """Yield tasks in the order of the files: lists of chunks with a total of about `TASK_BYTES`.

        Small files share a task. An interrupted task starts again from its beginning.
        """
        batch: list[Chunk] = []
        size = 0
        for file in self.files():
            if self.chosen_by_ending and self.contents is not None:
                kind, advice = io.kind_of(file)
                if kind and kind not in self.contents:
                    raise DataError(
                        f"the content of {file} ({kind}) does not match its suffix ({'/'.join(self.suffixes)}): "
                        f"{advice}; or name its reader, as {{name: ..., path: {file}}}"
                    )
            for chunk in self.chunks(file):
                if batch and size + chunk.stop - chunk.start > TASK_BYTES:
                    yield batch
                    batch, size = [], 0
                batch.append(chunk)
                size += chunk.stop - chunk.start
        if batch:
            yield batch

    def read(self, task: list[Chunk]) -> Iterator[Document]:
        """Yield the documents of a task in order, and pass documents without valid text to `unusable`."""
        for chunk in task:
            for document in self.read_chunk(chunk):
                if reason := flaw(document.text):
                    self.unusable(document.source, reason)
                else:
                    yield document

    def unusable(self, source: str, reason: str) -> None:
        """Count an unusable record if the recipe drops such records; otherwise raise DataError."""
        if self.drops is None:
            if place := re.fullmatch(r"(.+) at byte (\d+)", source, re.DOTALL):
                source = f"{place[1]}:{line_number(Path(place[1]), int(place[2]))}"
            raise DataError(f"{source} {reason}")
        self.drops.drop(source, reason)


class ColumnReader(FileReader):
    """A reader of files with rows; each row has its text under a key."""

    @dataclass
    class Options(FileReader.Options):
        """Files to read, and the key of the text."""

        text_key: Text = "text"  # key or column of the text

    options: Options


def split_file(file: Path, separator: bytes, size: int | None = None) -> Iterator[Chunk]:
    """Yield chunks that end with a separator and have at least `size` bytes (default: `TASK_BYTES`), except the last.

    A chunk of a compressed file has its bytes in `data`, because such a file can only be read from the beginning. Only
    one chunk is held in memory at a time.
    """
    sought, start = not io.is_compressed(file), 0
    with io.opened(file) as stream:
        for piece in io.pieces(stream, separator, size or TASK_BYTES):
            yield Chunk(file, start, start + len(piece), None if sought else piece)
            start += len(piece)


def line_number(file: Path, offset: int) -> int:
    """Read a file up to a byte offset of its content, and return the line number there (counted from 1)."""
    starts = range(0, offset, 1 << 22)
    with io.opened(file) as stream:
        return 1 + sum(stream.read(min(starts.step, offset - start)).count(b"\n") for start in starts)
