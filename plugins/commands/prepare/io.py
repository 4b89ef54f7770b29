"""Open files (compressed or not) and tables, with a clear error if one cannot be read."""

import bz2
import gzip
import lzma
import os
import pickle
import re
import sys
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any, cast

from crosstrain import DataError, require
from crosstrain.utils.errors import explained, first_line, os_errors_as
from crosstrain.utils.files import open_regular
from crosstrain.utils.paths import near

from .resource_limits import OutOfTime, at_most

_MAX_RATIO, _SMALL = 250, 64 << 20  # limit on decompressed bytes: per byte of the file, and its minimum
MOST = 1 << 28  # limit in bytes on a line, a separated document, and a compressed file that is read as a whole
_MEMORY, _SECONDS = 3 << 28, 15  # limits on one step of reading: some rows of a table, or a JSON document
_HELD = 128  # rows of a table held in memory at once
_VALUE = 16  # bytes of overhead counted for each value of a table
_WINDOW = 31  # log2 of zstd's window in bytes: the format's maximum, as in `zstd --long=31`
HEAD = 4096  # bytes of a file's content that are enough to recognize its kind
_PACKED = {
    ".gz": rb"\x1f\x8b", ".bz2": rb"BZh[1-9](1AY&SY|\x17rE8P\x90)", ".xz": rb"\xfd7zXZ\0|\]\0\0[\0-\x80]",
    ".zst": rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18", ".utf-32": rb"\xff\xfe\0\0|\0\0\xfe\xff",
    ".utf-16": rb"\xff\xfe|\xfe\xff", ".utf-16-le": rb"[\[{]\0[^\0]\0", ".utf-16-be": rb"\0[\[{]\0[^\0]",
}  # fmt: skip
# Suffixes of compressed files and parts: .jsonl.gz, .jsonl.zstd, .jsonl.1, .json-00000-of-00010, .xml-p1p41242.bz2.
_PART = re.compile(r"(\.(gz|gzip|bz2|xz|lzma|zst|zstd)|[._-]\d+(-of-\d+)?|-p\d+p\d+)*$")


def is_compressed(path: Path) -> bool:
    """Return whether a file can only be read from its beginning, because it is compressed, UTF-16 or UTF-32."""
    with os_errors_as(DataError, f"{path} cannot be read"):
        return _packing(path) in _OPENERS


def _packing(path: Path) -> str:
    """Return the suffix for the compression or encoding that a file's first bytes show, else the file's suffix."""
    with open_regular(path) as file:
        head = file.read(16)
    return next((suffix for suffix, sign in _PACKED.items() if re.match(sign, head, re.DOTALL)), path.suffix.lower())


def _open_wide(path: Path, _: str) -> BytesIO:
    """Open a UTF-16 or UTF-32 file as UTF-8."""
    return BytesIO(path.read_bytes().decode(_packing(path)[1:]).encode())


_OPENERS: dict[str, Any] = {
    ".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open, ".lzma": lzma.open, ".zst": None, ".utf-16": _open_wide,
    ".utf-16-le": _open_wide, ".utf-16-be": _open_wide, ".utf-32": _open_wide,
}  # fmt: skip


def has_suffix(path: Path, suffixes: tuple[str, ...]) -> bool:
    """Return whether a file's name ends with one of `suffixes`, ignoring suffixes of compression and parts."""
    return bool(suffixes) and _PART.sub("", path.name.lower()).endswith(suffixes)


@contextmanager
def opened(path: Path) -> Iterator[IO[bytes]]:
    """Open a file for reading, decompressed, and converted from UTF-16 or UTF-32 to UTF-8.

    Raises DataError if it is missing, truncated or damaged.
    """
    damage = cast("type[Exception]", ValueError)
    try:
        packing = _packing(path)  # refuses pipes, sockets and devices
        opener, options = _OPENERS.get(packing, open), {}
        if opener is None:
            module = "compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd"
            zstd = require(module, f"reading {path}")
            opener, damage = zstd.open, zstd.ZstdError
            options = {"options": {zstd.DecompressionParameter.window_log_max: _WINDOW}}
        with opener(path, "rb", **options) as stream:
            yield cast("IO[bytes]", _Decompressed(stream, path, damage)) if packing in _OPENERS else stream
    except FileNotFoundError:
        raise DataError(f"{path} does not exist") from None
    except EOFError:
        raise DataError(f"{path} is truncated: it ends in the middle of the compressed data; fetch it again") from None
    except (OSError, zlib.error, lzma.LZMAError, ValueError) as error:
        if isinstance(error, OSError) and error.errno is not None:  # gzip and bz2 set no errno for damaged data
            raise DataError(f"{path} cannot be read: {error.strerror}") from None
        raise DataError(f"{path} is damaged, or not what its ending says: {error}") from None


class _Decompressed:
    """Decompressed content with a size limit. Raises ValueError if the file is damaged or its content too large."""

    def __init__(self, stream: Any, path: Path, damage: type[Exception]) -> None:
        self._stream, self._damage = stream, damage
        self._limit = _allowed(path.stat().st_size)
        self._read = 0

    def read(self, size: int = -1) -> bytes:
        rest = self._limit - self._read + 1
        try:
            data = self._stream.read(min(size if size >= 0 else MOST + 1, rest))
        except self._damage as error:
            raise ValueError(str(error)) from None
        self._read += len(data)
        if self._read > self._limit:
            raise ValueError(f"it becomes more than {_MAX_RATIO} times as large, as no text does; decompress it first")
        if size < 0 and len(data) > MOST:
            raise ValueError(f"it holds more than {MOST >> 20} MiB in one document; decompress and separate it")
        return data


def pieces(stream: IO[bytes], separator: bytes, least: int = 1) -> Iterator[bytes]:
    """Yield the content in pieces that end with a separator and have at least `least` bytes, except perhaps the last.

    Only a little is read ahead. Raises ValueError if there is no separator for more than `MOST` bytes.
    """
    held, start = bytearray(), least
    while block := stream.read(max(least, 1 << 20)):
        held += block
        while (stop := _boundary(held, separator, start)) >= 0:
            yield bytes(memoryview(held)[:stop])
            del held[:stop]
            start = least
        start = max(least, len(held) + 1)  # everything before this has already been searched
        if len(held) > MOST:
            raise ValueError(f"it has no {separator!r} for more than {MOST >> 20} MiB; separate its documents")
    if held:
        yield bytes(held)


def _boundary(data: bytearray, separator: bytes, least: int) -> int:
    """Return the end of the first separator that ends at `least` or later; -1 if there is none.

    A separator that overlaps an earlier match is skipped, because splitting from the beginning may not find it.
    """
    length = len(separator)
    found = data.find(separator, max(0, least - length))
    while found >= 0 and data.find(separator, max(0, found - length + 1)) != found:
        found = data.find(separator, found + 1)
    return found + length if found >= 0 else -1


@contextmanager
def bounded(path: Path, more: int = 0) -> Iterator[None]:
    """Limit the memory and CPU time of one step of reading. `more`: bytes to add to the usual memory limit.

    Raises DataError if a limit is reached.
    """
    try:
        with at_most(_MEMORY + more, _SECONDS):
            yield
    except (MemoryError, OutOfTime):
        raise DataError(
            f"{path} takes more than {_MEMORY >> 20} MiB or {_SECONDS} seconds for some rows, as no text does"
        ) from None


def _allowed(size: int) -> int:
    """Return the limit on decompressed bytes for a file of `size` bytes."""
    return max(_SMALL, _MAX_RATIO * size)


def _rows(path: Path, left: int, batches: Iterator[list[Any]]) -> Iterator[Any]:
    """Yield the rows of batches. Raises DataError if they have more than `left` bytes in total."""
    while left >= 0:
        with bounded(path):
            batch = next(batches, None)
            left -= len(pickle.dumps(batch))  # a value that is stored once may occur in many rows
        if batch is None:
            return
        yield from batch if left >= 0 else ()
    raise DataError(f"{path} becomes more than {_MAX_RATIO} times as large as it is, as no text does")


@contextmanager
def parquet_table(file: Path) -> Iterator[SimpleNamespace]:
    """Open a Parquet file with pyarrow; yield its metadata, column names, and `rows`, a function like iter_batches.

    A few bytes of the file can expand to gigabytes. Raises DataError if the file, or a row read from it in the block,
    is damaged or too large.
    """
    pyarrow, parquet = require("pyarrow", f"reading {file}"), require("pyarrow.parquet", f"reading {file}")
    try:
        with bounded(file):
            # File names need not be UTF-8. With a buffer, a row group is not held in memory as a whole.
            table = parquet.ParquetFile(pyarrow.OSFile(os.fsencode(file)), buffer_size=1 << 20)
        groups = [table.metadata.row_group(number) for number in range(table.metadata.num_row_groups)]
        parts = [group.column(number) for group in groups for number in range(table.metadata.num_columns)]
        least = sum(part.total_uncompressed_size + _VALUE * part.num_values for part in parts)

        def rows(**chosen: Any) -> Iterator[Any]:
            batches = table.iter_batches(batch_size=_HELD, use_threads=False, **chosen)
            return _rows(file, _allowed(file.stat().st_size) - least, (batch.to_pylist() for batch in batches))

        try:
            yield SimpleNamespace(metadata=table.metadata, names=table.schema_arrow.names, rows=rows)
        finally:
            table.close(force=True)
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise DataError(f"{file} is not a readable Parquet file: {first_line(error)}") from None


def saved_dataset(folder: Path) -> Any:
    """Open a folder written by `datasets.save_to_disk`. Raises DataError if it is damaged or compressed."""
    library, size = require("datasets", f"reading {folder}"), _arrow_bytes(folder)
    with explained(f"{folder} cannot be read as a Hugging Face dataset", DataError), bounded(folder, size):
        dataset = library.load_from_disk(str(folder))
    if dataset.data.nbytes > size:
        raise DataError(f"{folder} holds compressed tables, as save_to_disk writes none: write it again uncompressed")
    return dataset


def saved_rows(folder: Path, dataset: Any) -> Iterator[Any]:
    """Yield the rows of a saved dataset. Raises DataError if they are not UTF-8 text, or too large."""
    tables = dataset.with_format("arrow").iter(_HELD)
    try:
        yield from _rows(folder, _allowed(_arrow_bytes(folder)), (table.to_pylist() for table in tables))
    except UnicodeDecodeError as error:
        raise DataError(f"{folder} is not UTF-8 text: {error}") from None


def _arrow_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.arrow"))


def existing(item: str) -> Path:
    """Return the path of an input file or folder. Raises DataError if it does not exist."""
    path = Path(item).expanduser()
    if not path.exists():
        hint = near(path) or ("" if path.suffix or item[:1] in "/.~" else "data of a hub are downloaded first")
        raise DataError(f"the input {item} does not exist{f'; {hint}' if hint else ''}")
    if not (path.is_file() or path.is_dir()):
        raise DataError(f"the input {item} is neither a file nor a folder")
    return path


def files_below(folder: Path) -> list[Path]:
    """List the files at any depth below a folder, sorted by path, excluding hidden ones.

    Raises DataError for an entry that may hold text but cannot be read: a folder without permission, a broken link, a
    link to a folder, a pipe, a socket or a device.
    """

    def fail(error: OSError) -> None:
        raise DataError(f"{error.filename} cannot be read: {error.strerror}") from None

    found = []
    for root, folders, names in os.walk(folder, onerror=fail):
        for path in (Path(root, name) for name in folders + names if not name.startswith(".")):
            if path.is_file():
                found.append(path)
            elif path.is_symlink() or not path.is_dir():
                kind = "a link to a folder" if path.is_dir() else "a link to nothing, or no regular file"
                raise DataError(f"{path} is {kind}: name its target as an input of its own, or remove it")
    return sorted(found)


def nothing_in(folder: Path, wanted: str) -> DataError:
    """Return the error for a folder without a readable file; it lists the kinds of files found instead."""
    kinds = Counter(file.suffix or "no suffix" for file in files_below(folder)).most_common(3)
    found = ", ".join(f"{count} with {kind}" for kind, count in kinds) or "nothing"
    return DataError(f"{folder} holds no {wanted} file (found: {found})")
