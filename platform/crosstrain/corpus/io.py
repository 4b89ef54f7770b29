"""Files as streams of bytes, compressed or not, and what is said where one cannot be read."""

from __future__ import annotations

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

from crosstrain.utils.errors import DataError
from crosstrain.utils.files import open_regular
from crosstrain.utils.optional_deps import require

COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
_RATIO, _LITTLE = 250, 64 << 20  # bytes that come of one, and of a small file
_WHOLE = 2 << 30  # bytes of a compressed file that is read at once


def plain_name(path: Path) -> str:
    """The file's name without the ending of a compression."""
    return path.stem if path.suffix.lower() in COMPRESSED else path.name


def is_compressed(path: Path) -> bool:
    return path.suffix.lower() in COMPRESSED


@contextmanager
def opened(path: Path) -> Iterator[IO[bytes]]:
    """The content of a file, decompressed by its ending. DataError for what is missing, truncated or damaged."""
    stream: Any = None
    damage: type[Exception] = ValueError
    try:
        open_regular(path).close()  # refuses what is no file
        match path.suffix.lower():
            case ".gz":
                stream = gzip.open(path)  # noqa: SIM115
            case ".bz2":
                stream = bz2.open(path)  # noqa: SIM115
            case ".xz":
                stream = lzma.open(path)  # noqa: SIM115
            case ".zst":
                module = "compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd"
                zstd = require(module, f"reading {path}")
                stream, damage = zstd.open(path), zstd.ZstdError
            case _:
                stream = open(path, "rb")  # noqa: SIM115
        with stream:
            yield cast("IO[bytes]", _Decompressed(stream, path, damage)) if is_compressed(path) else stream
    except FileNotFoundError:
        raise DataError(f"{path} does not exist") from None
    except EOFError:
        raise DataError(f"{path} is truncated: it ends in the middle of the compressed data; fetch it again") from None
    except (gzip.BadGzipFile, zlib.error, lzma.LZMAError, ValueError) as error:
        raise DataError(f"{path} is damaged, or not what its ending says: {error}") from None
    except OSError as error:
        if error.errno is None:  # bz2 says so of damaged data
            raise DataError(f"{path} is damaged, or not what its ending says: {error}") from None
        raise DataError(f"{path} cannot be read: {error.strerror}") from None


class _Decompressed:
    """What comes of a compressed file, within bounds. ValueError where it is damaged, or beyond them."""

    def __init__(self, stream: Any, path: Path, damage: type[Exception]) -> None:
        self._stream, self._damage = stream, damage
        self._most = max(_LITTLE, _RATIO * path.stat().st_size)
        self._read = 0

    def read(self, size: int = -1) -> bytes:
        most = self._most - self._read + 1
        try:
            data = self._stream.read(min(size, most) if size >= 0 else min(_WHOLE + 1, most))
        except self._damage as error:
            raise ValueError(str(error)) from None
        self._read += len(data)
        if self._read > self._most:
            raise ValueError(f"it becomes more than {_RATIO} times as large, as no text does; decompress it yourself")
        if size < 0 and len(data) > _WHOLE:
            raise ValueError(f"it holds more than {_WHOLE >> 30} GiB in one document; decompress and separate it")
        return data


def read_range(path: Path, start: int, stop: int) -> bytes:
    """Bytes [start, stop) of a file that is not compressed."""
    with opened(path) as stream:
        stream.seek(start)
        return stream.read(stop - start)


def read_all(path: Path) -> bytes:
    """The content of a file, decompressed."""
    with opened(path) as stream:
        return stream.read()


def existing(item: str) -> Path:
    """The path of the file or folder that an option names. DataError where there is none."""
    path = Path(item).expanduser()
    if not path.exists():
        raise DataError(f"the input {item} does not exist")
    if not (path.is_file() or path.is_dir()):
        raise DataError(f"the input {item} is neither a file nor a folder")
    return path


def files_below(folder: Path) -> list[Path]:
    """Files at any depth, sorted by path; hidden ones are left out.

    DataError for what can hold text and cannot be read so: a folder without permission, a link to nothing or to
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
                raise DataError(f"{path} is {kind}: name what it stands for as an input of its own, or remove it")
    return sorted(found)


def nothing_in(folder: Path, wanted: str) -> DataError:
    """The error for a folder in which nothing can be read, with what it holds instead."""
    kinds = Counter(file.suffix or "no suffix" for file in files_below(folder)).most_common(3)
    found = ", ".join(f"{count} with {kind}" for kind, count in kinds) or "nothing"
    return DataError(f"{folder} holds no {wanted} file (found: {found})")
