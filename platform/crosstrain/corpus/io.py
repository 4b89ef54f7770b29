"""Open files, compressed or not, and tables, with one clear error where one cannot be read."""

import bz2
import gzip
import lzma
import os
import sys
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

from crosstrain.utils.errors import DataError, first_line
from crosstrain.utils.files import open_regular
from crosstrain.utils.optional_deps import require
from crosstrain.utils.paths import near

_OPENERS: dict[str, Any] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open, ".zst": None}
_MAX_RATIO, _SMALL = 250, 64 << 20  # decompressed bytes per byte of the file, and of any file
_MAX_READ = 2 << 30  # bytes of a compressed file that one `read()` may return


def is_compressed(path: Path) -> bool:
    """Tell by its suffix whether a file is compressed."""
    return path.suffix.lower() in _OPENERS


def has_suffix(path: Path, suffixes: tuple[str, ...]) -> bool:
    """Tell whether a file's name, without the suffix of a compression, ends with one of `suffixes`."""
    name = path.stem if is_compressed(path) else path.name
    return bool(suffixes) and name.lower().endswith(suffixes)


@contextmanager
def opened(path: Path) -> Iterator[IO[bytes]]:
    """Open a file for reading, decompressed by its suffix. DataError if it is missing, truncated or damaged."""
    opener, damage = _OPENERS.get(path.suffix.lower(), open), cast("type[Exception]", ValueError)
    try:
        open_regular(path).close()  # refuses pipes, sockets and devices
        if opener is None:
            module = "compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd"
            zstd = require(module, f"reading {path}")
            opener, damage = zstd.open, zstd.ZstdError
        with opener(path, "rb") as stream:
            yield cast("IO[bytes]", _Decompressed(stream, path, damage)) if is_compressed(path) else stream
    except FileNotFoundError:
        raise DataError(f"{path} does not exist") from None
    except EOFError:
        raise DataError(f"{path} is truncated: it ends in the middle of the compressed data; fetch it again") from None
    except (OSError, zlib.error, lzma.LZMAError, ValueError) as error:
        if isinstance(error, OSError) and error.errno is not None:  # gzip and bz2 set no errno for damaged data
            raise DataError(f"{path} cannot be read: {error.strerror}") from None
        raise DataError(f"{path} is damaged, or not what its ending says: {error}") from None


class _Decompressed:
    """Decompressed content of bounded size. ValueError where the file is damaged, or its content too large."""

    def __init__(self, stream: Any, path: Path, damage: type[Exception]) -> None:
        self._stream, self._damage = stream, damage
        self._limit = max(_SMALL, _MAX_RATIO * path.stat().st_size)
        self._read = 0

    def read(self, size: int = -1) -> bytes:
        rest = self._limit - self._read + 1
        try:
            data = self._stream.read(min(size if size >= 0 else _MAX_READ + 1, rest))
        except self._damage as error:
            raise ValueError(str(error)) from None
        self._read += len(data)
        if self._read > self._limit:
            raise ValueError(f"it becomes more than {_MAX_RATIO} times as large, as no text does; decompress it first")
        if size < 0 and len(data) > _MAX_READ:
            raise ValueError(f"it holds more than {_MAX_READ >> 30} GiB in one document; decompress and separate it")
        return data


@contextmanager
def parquet_table(file: Path) -> Iterator[Any]:
    """Open a Parquet file with pyarrow. DataError if it, or data read from it in the block, is damaged."""
    pyarrow, parquet = require("pyarrow", f"reading {file}"), require("pyarrow.parquet", f"reading {file}")
    try:
        table = parquet.ParquetFile(pyarrow.OSFile(os.fsencode(file)))  # names need not be UTF-8
        try:
            yield table
        finally:
            table.close(force=True)
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{file} is not a readable Parquet file: {first_line(error)}") from None


def saved_dataset(folder: Path) -> Any:
    """Open a folder that `datasets.save_to_disk` wrote. DataError if it is damaged."""
    library = require("datasets", f"reading {folder}")
    try:
        return library.load_from_disk(str(folder))
    except Exception as error:  # whatever of its many parts finds fault
        raise DataError(f"{folder} cannot be read as a Hugging Face dataset: {error}") from None


def existing(item: str) -> Path:
    """Return the path of the file or folder that an option names. DataError if there is none."""
    path = Path(item).expanduser()
    if not path.exists():
        hint = near(path) or ("" if path.suffix or item[:1] in "/.~" else "data of a hub are downloaded first")
        raise DataError(f"the input {item} does not exist{f'; {hint}' if hint else ''}")
    if not (path.is_file() or path.is_dir()):
        raise DataError(f"the input {item} is neither a file nor a folder")
    return path


def files_below(folder: Path) -> list[Path]:
    """List the files at any depth below a folder, sorted by path, without hidden ones.

    DataError for an entry that may hold text and cannot be read: a folder without permission, a link to nothing or to
    another folder, a pipe, a socket, a device.
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
    """Return the error for a folder without a readable file; it says which files are there instead."""
    kinds = Counter(file.suffix or "no suffix" for file in files_below(folder)).most_common(3)
    found = ", ".join(f"{count} with {kind}" for kind, count in kinds) or "nothing"
    return DataError(f"{folder} holds no {wanted} file (found: {found})")
