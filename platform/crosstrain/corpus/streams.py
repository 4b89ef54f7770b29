"""Files as streams of bytes, compressed or not, and what is said where one cannot be read."""

from __future__ import annotations

import bz2
import gzip
import lzma
import sys
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from crosstrain.errors import DataError
from crosstrain.extras import require

COMPRESSED = (".gz", ".bz2", ".xz", ".zst")


def plain_name(path: Path) -> str:
    """The file's name without the ending of a compression."""
    return path.stem if path.suffix.lower() in COMPRESSED else path.name


def is_compressed(path: Path) -> bool:
    return path.suffix.lower() in COMPRESSED


@contextmanager
def opened(path: Path) -> Iterator[IO[bytes]]:
    """The content of a file, decompressed by its ending. DataError for what is missing, truncated or damaged."""
    stream: Any = None
    try:
        match path.suffix.lower():
            case ".gz":
                stream = gzip.open(path)  # noqa: SIM115
            case ".bz2":
                stream = bz2.open(path)  # noqa: SIM115
            case ".xz":
                stream = lzma.open(path)  # noqa: SIM115
            case ".zst":
                stream = _zstd(path)
            case _:
                stream = open(path, "rb")  # noqa: SIM115
        with stream:
            yield stream
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


def _zstd(path: Path) -> Any:
    module = "compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd"
    zstd = require(module, f"reading {path}")
    stream = zstd.open(path)
    return _Translated(stream, zstd.ZstdError)


class _Translated:
    """A stream whose library has an error of its own for damaged data; it becomes a ValueError."""

    def __init__(self, stream: Any, error: type[Exception]) -> None:
        self.stream, self.error = stream, error

    def read(self, size: int = -1) -> bytes:
        try:
            return self.stream.read(size)
        except self.error as error:
            raise ValueError(str(error)) from None

    def __enter__(self) -> _Translated:
        return self

    def __exit__(self, *_: object) -> None:
        self.stream.close()


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
    """The path that an option names. DataError where nothing is there."""
    path = Path(item).expanduser()
    if not path.exists():
        raise DataError(f"the input {item} does not exist")
    return path


def files_below(folder: Path) -> list[Path]:
    """Files at any depth, sorted by path; hidden ones are left out."""
    return sorted(file for file in folder.rglob("*") if file.is_file() and not file.name.startswith("."))


def nothing_in(folder: Path, wanted: str) -> DataError:
    """The error for a folder in which nothing can be read, with what it holds instead."""
    kinds = Counter(file.suffix or "no suffix" for file in files_below(folder)).most_common(3)
    found = ", ".join(f"{count} with {kind}" for kind, count in kinds) or "nothing"
    return DataError(f"{folder} holds no {wanted} file (found: {found})")
