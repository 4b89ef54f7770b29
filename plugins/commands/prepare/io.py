"""Open files (compressed or not), tables and JSON documents, with a clear error if a file cannot be read."""

import bz2
import gzip
import json
import lzma
import os
import pickle
import re
import resource
import signal
import sys
import threading
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any, NoReturn, cast

from crosstrain import DataError, first_line, open_regular, os_errors_as, read_regular, require
from crosstrain.utils.files import unique_keys
from crosstrain.utils.limited_process import address_space
from crosstrain.utils.paths import near

_MAX_RATIO, _SMALL = 250, 64 << 20  # limit on decompressed bytes: the larger of 250 times the file's size and 64 MiB
MOST = 1 << 28  # limit in bytes on a line, a document, and a compressed file that is read as a whole
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
# Suffixes of compressed files and of parts: .jsonl.gz, .jsonl.zstd, .jsonl.1, .json-00000-of-00010, .xml-p1p41242.bz2.
_PART = re.compile(r"(\.(gz|gzip|bz2|xz|lzma|zst|zstd)|[._-]\d+(-of-\d+)?|-p\d+p\d+)*$")
Row = dict[str, Any]
# The beginning of a JSON document: a list of objects, or an object over several lines. The group `perhaps` matches an
# object that contains a list of objects: it may be a document, or the first of several JSON lines.
_DOCUMENT = re.compile(rb'(\xef\xbb\xbf)?\s*((?P<list>\[\s*[{\]])|\{[ \t]*\r?\n|(?P<perhaps>\{[^\n]*?"\s*:\s*\[\s*\{))')
_EXPANSION = 4  # bytes of memory allowed per byte of a document
_UNPACK = "unpack it, and name the files inside"
_CONVERT = "extract its text into .txt, .jsonl or .parquet files first"
# Name -> (regular expression for the beginning, advice if the reader does not accept this kind). First match wins.
_KINDS = {
    "Git LFS pointer": (rb"version https://git-lfs", "fetch the content with `git lfs pull`"),
    "PDF": (rb"%PDF-", _CONVERT),
    "zip archive": (rb"PK(\x03\x04|\x05\x06)", f"{_UNPACK}; if it is a document, {_CONVERT}"),
    "tar archive": (rb".{257}ustar", _UNPACK),
    "7z archive": (rb"7z\xbc\xaf\x27\x1c", _UNPACK),
    "RAR archive": (rb"Rar!\x1a\x07", _UNPACK),
    "compressed file": (
        rb"\x1f[\x8b\x9d]|BZh[1-9]1AY|\xfd7zXZ|\x28\xb5\x2f\xfd|\x04\x22\x4d\x18",
        "decompress it once",
    ),
    "image": (
        rb"\x89PNG|\xff\xd8\xff|GIF8[79]a|RIFF....WEBP|BM.{12}[\x0c\x28\x6c\x7c]\0\0\0|II\*\0|MM\0\*",
        _CONVERT,
    ),
    "audio or video": (rb"ID3|OggS|fLaC|RIFF....(WAVE|AVI )|.{4}ftyp|\x1a\x45\xdf\xa3", _CONVERT),
    "program": (rb"\x7fELF|MZ.{62}|\xca\xfe\xba\xbe|\xcf\xfa\xed\xfe|\0asm", _CONVERT),
    "SQLite database": (rb"SQLite format 3\0", _CONVERT),
    "HDF5 file": (rb"\x89HDF\r\n", _CONVERT),
    "NumPy array": (rb"\x93NUMPY", _CONVERT),
    "pickle": (rb"\x80[\x02-\x05][}\]c(\x8c\x95]", _CONVERT),
    "Word document": (rb"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", _CONVERT),
    "RTF document": (rb"\{\\rtf", _CONVERT),
    "PostScript": (rb"%!PS", _CONVERT),
    "Parquet table": (rb"PAR1", "name it .parquet"),
    "Arrow table": (
        rb"ARROW1\0\0|\xff{4}.\x01\0\0\x10\0\0\0",
        "name it .arrow",
    ),
    "Avro table": (rb"Obj\x01", "write it as Parquet"),
    "ORC table": (rb"ORC", "write it as Parquet"),
    "ARC archive": (rb"filedesc://", "convert it to WARC, with `warcio recompress`"),
    "WARC archive": (rb"WARC/\d", "name it .warc"),
    "MediaWiki dump": (rb"\s*(<\?xml[^>]*>\s*)?<mediawiki", "name it .xml"),
    "HTML page": (rb"(?i)\s*(<\?xml[^>]*>\s*)?(<!--.*?-->\s*)*<(!doctype html|html|head|body)\b", "name it .html"),
    "XML document": (rb"\s*<(\?xml|svg|rss|TEI)\b", _CONVERT),
    "JSON document": (rb'\s*(\[\s*)?\{\s*"[^"\n]*"\s*:', "name it .jsonl"),
}


def is_compressed(path: Path) -> bool:
    """Return whether a file can only be read from its beginning, because it is compressed, UTF-16 or UTF-32."""
    with os_errors_as(DataError, f"{path} cannot be read"):
        return _packing(path) in _OPENERS


def _packing(path: Path) -> str:
    """Return the suffix for the compression or encoding that a file's first bytes indicate, else the file's suffix."""
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
    """Return whether a file's name ends with one of `suffixes`, ignoring suffixes for compression and for parts."""
    return _PART.sub("", path.name.lower()).endswith(suffixes)


@contextmanager
def opened(path: Path) -> Iterator[IO[bytes]]:
    """Open a file for reading, decompressed, and converted from UTF-16 or UTF-32 to UTF-8.

    Raises DataError if the file is missing, truncated or damaged.
    """
    damage: tuple[type[Exception], ...] = (OSError, zlib.error, lzma.LZMAError, ValueError)
    try:
        packing = _packing(path)  # refuses pipes, sockets and devices
        opener, options = _OPENERS.get(packing, open), {}
        if opener is None:
            zstd = require("compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd", f"reading {path}")
            opener, damage = zstd.open, (*damage, zstd.ZstdError)
            options = {"options": {zstd.DecompressionParameter.window_log_max: _WINDOW}}
        with opener(path, "rb", **options) as stream:
            yield cast("IO[bytes]", _Decompressed(stream, path)) if packing in _OPENERS else stream
    except EOFError:
        raise DataError(f"{path} is truncated: it ends in the middle of the compressed data; fetch it again") from None
    except damage as error:
        if isinstance(error, OSError) and error.errno is not None:  # gzip and bz2 set no errno for damaged data
            raise DataError(f"{path} cannot be read: {error.strerror}") from None
        raise DataError(f"{path} is damaged, or its content does not match its suffix: {error}") from None


class _Decompressed:
    """Decompressed content with a size limit. Raises ValueError if the content is too large."""

    def __init__(self, stream: Any, path: Path) -> None:
        self._stream, self._limit = stream, _allowed(path.stat().st_size)
        self._read = 0

    def read(self, size: int = -1) -> bytes:
        data = self._stream.read(min(size if size >= 0 else MOST + 1, self._limit - self._read + 1))
        self._read += len(data)
        if self._read > self._limit:
            raise ValueError(
                f"it expands to more than {_MAX_RATIO} times its size, which is unusual for text; decompress it first"
            )
        if size < 0 and len(data) > MOST:
            raise ValueError(f"it has a document of more than {MOST >> 20} MiB; decompress and split it")
        return data


def pieces(stream: IO[bytes], separator: bytes, least: int = 1) -> Iterator[bytes]:
    """Yield the content in pieces that end with a separator and have at least `least` bytes, except perhaps the last.

    Separators are matched from the beginning, as in `bytes.split`. The stream is read in blocks of `least` bytes, or
    of 1 MiB if `least` is smaller. Raises ValueError if there is no separator for more than `MOST` bytes.
    """
    held, start = bytearray(), 0  # start: where the next separator may begin
    while block := stream.read(max(least, 1 << 20)):
        held += block
        while (found := held.find(separator, start)) >= 0:
            start = found + len(separator)
            if start >= least:
                yield bytes(memoryview(held)[:start])
                del held[:start]
                start = 0
        start = max(start, len(held) - len(separator) + 1)
        if len(held) > MOST:
            raise ValueError(f"it has more than {MOST >> 20} MiB without {separator!r}; separate its documents")
    if held:
        yield bytes(held)


def _allowed(size: int) -> int:
    """Return the limit on decompressed bytes for a file of `size` bytes."""
    return max(_SMALL, _MAX_RATIO * size)


def _rows(path: Path, left: int, batches: Iterator[list[Any]]) -> Iterator[Any]:
    """Yield the rows of batches. Raises DataError if the rows have more than `left` bytes in total."""
    while left >= 0:
        with bounded(path):
            batch = next(batches, None)
            left -= len(pickle.dumps(batch))  # a value that is stored once may occur in many rows
        if batch is None:
            return
        yield from batch if left >= 0 else ()
    raise DataError(f"{path} expands to more than {_MAX_RATIO} times its size, which is unusual for text")


class _OutOfTime(BaseException):
    """Raised if the time limit is exceeded; a BaseException, because libraries may catch any Exception."""


@contextmanager
def bounded(path: Path, more: int = 0) -> Iterator[None]:
    """Limit one step of reading to 768 MiB of additional address space and 15 s of this process's CPU time.

    When the memory limit is exceeded, allocations fail as if memory were full. Memory is not limited if the system does
    not report a process's size. Time is limited only in the main thread, because only that thread receives signals.
    `more`: bytes to add to the memory limit. Raises DataError if a limit is reached.
    """

    def stop(_number: int, _frame: Any) -> NoReturn:
        raise _OutOfTime

    before = resource.getrlimit(resource.RLIMIT_AS)
    if (used := address_space()) is not None:
        limits = [bound for bound in (used + _MEMORY + more, *before) if bound != resource.RLIM_INFINITY]
        resource.setrlimit(resource.RLIMIT_AS, (min(limits), before[1]))
    timed = threading.current_thread() is threading.main_thread()
    handler = signal.signal(signal.SIGPROF, stop) if timed else None
    try:
        if timed:
            signal.setitimer(signal.ITIMER_PROF, _SECONDS)
        yield
    except (MemoryError, _OutOfTime):
        raise DataError(
            f"{path} takes more than {_MEMORY >> 20} MiB or {_SECONDS} seconds for some rows, which is unusual for text"
        ) from None
    finally:
        if timed:
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.signal(signal.SIGPROF, handler)
        resource.setrlimit(resource.RLIMIT_AS, before)


@contextmanager
def table(file: Path) -> Iterator[SimpleNamespace]:
    """Open a Parquet file, or an Arrow file or stream, with pyarrow.

    Yield an object with `names` (column names), `groups` (number of rows of each row group; an Arrow file counts as
    one group of 0 rows) and `rows` (a function of `row_groups` and `columns` that yields rows).

    A few bytes of the file can expand to gigabytes. Raises DataError if the file, or a row read from it in the block,
    is damaged or too large.
    """
    pyarrow, kind = require("pyarrow", f"reading {file}"), "Arrow" if has_suffix(file, (".arrow",)) else "Parquet"
    try:
        with pyarrow.OSFile(os.fsencode(file)) as source:  # file names need not be UTF-8
            yield (_arrow if kind == "Arrow" else _parquet)(file, source)
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise DataError(f"{file} is not a readable {kind} file: {first_line(error)}") from None


def _parquet(file: Path, source: Any) -> SimpleNamespace:
    with bounded(file):
        # With a buffer, pyarrow does not hold a whole row group in memory.
        opened = require("pyarrow.parquet", f"reading {file}").ParquetFile(source, buffer_size=1 << 20)
    groups = [opened.metadata.row_group(number) for number in range(opened.metadata.num_row_groups)]
    parts = [group.column(number) for group in groups for number in range(opened.metadata.num_columns)]
    least = sum(part.total_uncompressed_size + _VALUE * part.num_values for part in parts)

    def rows(**chosen: Any) -> Iterator[Any]:
        batches = opened.iter_batches(batch_size=_HELD, use_threads=False, **chosen)
        return _rows(file, _allowed(file.stat().st_size) - least, (batch.to_pylist() for batch in batches))

    return SimpleNamespace(names=opened.schema_arrow.names, groups=[group.num_rows for group in groups], rows=rows)


def _arrow(file: Path, source: Any) -> SimpleNamespace:
    with bounded(file):
        source.seek(8 if source.read(6) == b"ARROW1" else 0)  # in an Arrow file, a stream follows these 8 bytes
        stream = require("pyarrow.ipc", f"reading {file}").open_stream(source)

    def lists() -> Iterator[list[Any]]:
        for batch in stream:
            batch.validate(full=True)
            for start in range(0, len(batch), _HELD):
                yield batch.slice(start, _HELD).to_pylist()

    def rows(**_: Any) -> Iterator[Any]:
        return _rows(file, _allowed(file.stat().st_size), lists())

    return SimpleNamespace(names=stream.schema.names, groups=[0], rows=rows)


def existing(item: str) -> Path:
    """Return the path of an input file or folder. Raises DataError if the input does not exist."""
    path = Path(item).expanduser()
    if not path.exists():
        hint = near(path) or ("" if path.suffix or item[:1] in "/.~" else "download data from a hub first")
        raise DataError(f"the input {item} does not exist{f'; {hint}' if hint else ''}")
    if not (path.is_file() or path.is_dir()):
        raise DataError(f"the input {item} is neither a file nor a folder")
    return path


def files_below(folder: Path) -> list[Path]:
    """List the files at any depth below a folder, sorted by path, excluding hidden files.

    Raises DataError for an entry that may hold text but cannot be read: a folder without permission, a broken link, a
    link to a folder, a pipe, a socket or a device.
    """

    def fail(error: OSError) -> None:
        raise DataError(f"{error.filename} cannot be read: {error.strerror}") from None

    found = []
    for root, folders, names in os.walk(folder, onerror=fail):
        tables = [name for name in names if name.endswith(".arrow") and not name.startswith("cache-")]
        if "dataset_dict.json" in names or ("dataset_info.json" in names and tables):  # written by save_to_disk
            with os_errors_as(DataError, f"{root}/state.json cannot be read"):
                state = read_regular(Path(root, "state.json"), 1 << 24) if "state.json" in names else b""
            # Other tables are of an earlier dataset in the same folder.
            names = [name for name in tables if not state or os.fsencode(f'"{name}"') in state]
        for path in (Path(root, name) for name in folders + names if not name.startswith(".")):
            if path.is_file():
                found.append(path)
            elif path.is_symlink() or not path.is_dir():
                raise DataError(
                    f"{path} is {'a link to a folder' if path.is_dir() else 'a broken link, or not a regular file'}: "
                    f"give its target as a separate input, or remove it"
                )
    return sorted(found)


def nothing_in(folder: Path, wanted: str) -> DataError:
    """Return the error for a folder without a readable file, with the kinds of files that are there instead."""
    kinds = Counter(file.suffix or "no suffix" for file in files_below(folder)).most_common(3)
    found = ", ".join(f"{count} with {kind}" for kind, count in kinds) or "nothing"
    return DataError(f"{folder} holds no {wanted} file (found: {found})")


def kind_of(file: Path) -> tuple[str, str]:
    """Return (name, advice) for the kind of a file's content; `("", "")` for plain text and unknown kinds.

    Raises DataError if the file cannot be read.
    """
    with opened(file) as stream:
        head = stream.read(HEAD).removeprefix(b"\xef\xbb\xbf")
    return next(
        ((name, advice) for name, (sign, advice) in _KINDS.items() if re.match(sign, head, re.DOTALL)), ("", "")
    )


def parsed(text: bytes) -> Any:
    """Parse a JSON value. Raises ValueError for invalid JSON, and for an object with a repeated key."""
    try:
        return json.loads(text.decode("utf-8-sig"), object_pairs_hook=unique_keys)
    except RecursionError as error:
        raise ValueError(str(error)) from None


def entries(file: Path, is_row: Callable[[Row], bool]) -> list[Any] | None:
    """Return the entries of a file that is one JSON value; None for a file of JSON lines.

    The value is a row, a list of rows, or an object with a list of rows (its key `data`, or its only list). The
    object's other keys are added to each row. Raises DataError for a damaged list, or if the value or the rows need too
    much memory.
    """
    with opened(file) as stream:
        data = stream.read(HEAD)
        found = _DOCUMENT.match(data)
        if not found:
            return None
        data += stream.read(MOST if found["perhaps"] else max(MOST, file.stat().st_size))
    try:
        with bounded(file, _EXPANSION * len(data)):
            content = parsed(data)
    except ValueError as error:
        if found["list"]:
            raise DataError(
                f"{file}: it is not JSON ({error}), or it is compressed and has more than {MOST >> 20} MiB of JSON"
            ) from None
        return None
    if isinstance(content, list):
        return content
    if is_row(content):
        return None if found["perhaps"] else [content]
    lists = [name for name, value in content.items() if isinstance(value, list)]
    if "data" not in lists and len(lists) != 1:
        return [content]
    rows = content.pop("data" if "data" in lists else lists[0])
    if len(json.dumps(content)) * len(rows) > MOST:
        raise DataError(f"{file}: the keys next to its list are too large to repeat in every row: remove them")
    return [content | row if isinstance(row, dict) else row for row in rows]
