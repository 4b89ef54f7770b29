"""Read byte ranges of local files, and of objects in buckets; ranges in buckets can be fetched ahead of time."""

import os
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import cast

from crosstrain.utils import storage
from crosstrain.utils.files import open_regular

Range = tuple[int, int]  # (first byte, last byte + 1)

_BLOCK, _BLOCKS = 1 << 16, 256  # block size and number of cached blocks, for reads that were not announced
_HELD = 64 << 20  # maximum number of bytes that are announced but not read
_STALE = 64  # unread ranges, for example of a run that was rolled back, are dropped after this many announcements


def byte_source(place: str | Path) -> "LocalBytes | RemoteBytes":
    """Open a file or an object. Raises OSError, such as FileNotFoundError, and StorageError."""
    return RemoteBytes(place) if isinstance(place, str) and storage.is_url(place) else LocalBytes(Path(place))


class LocalBytes:
    """A file that is read, not memory-mapped."""

    def __init__(self, path: Path) -> None:
        self._file = open_regular(path)
        self.size = os.fstat(self._file.fileno()).st_size

    def read(self, first: int, last: int) -> bytes:
        """Return bytes [first, last), or fewer at the end of the file."""
        data = os.pread(self._file.fileno(), last - first, first)
        while (left := last - first - len(data)) and (more := os.pread(self._file.fileno(), left, last - left)):
            data += more  # one call reads at most 2 GiB
        return data


class RemoteBytes:
    """An object in a bucket; announced ranges and the most recently read blocks are kept in bounded memory."""

    def __init__(self, url: str) -> None:
        self._url, self.size = url, storage.size(url)
        # range -> (index of the announcement, future of its data, position in the announcement), oldest first
        self._announced: dict[Range, tuple[int, Future[list[bytes]], int]] = {}
        self._count, self._held, self._threads = 0, 0, cast("ThreadPoolExecutor | None", None)
        self._block = lru_cache(_BLOCKS)(lambda n: storage.read(url, n * _BLOCK, min((n + 1) * _BLOCK, self.size)))

    def announce(self, ranges: Iterable[Range]) -> None:
        """Start to fetch ranges that will be read soon, adjacent ones together.

        Ranges beyond the memory limit are fetched when they are read.
        """
        self._count += 1
        while self._announced and next(iter(self._announced.values()))[0] < self._count - _STALE:
            first, last = next(iter(self._announced))
            del self._announced[first, last]
            self._held -= last - first
        new = [found for found in dict.fromkeys(ranges) if found not in self._announced]
        while new and self._held + sum(last - first for first, last in new) > _HELD:
            new.pop()
        if new:
            self._threads = self._threads or ThreadPoolExecutor(8, "read ahead")
            future = self._threads.submit(storage.read_ranges, self._url, new)
            self._announced |= {found: (self._count, future, place) for place, found in enumerate(new)}
            self._held += sum(last - first for first, last in new)

    def read(self, first: int, last: int) -> bytes:
        """Return bytes [first, last), or fewer at the end of the object."""
        last = min(last, self.size)
        if (found := self._announced.pop((first, last), None)) is not None:
            self._held -= last - first
            parts, place = found[1].result(), found[2]
            data, parts[place] = parts[place], b""  # the announcement's other ranges stay until they are read
            return data
        if last - first > _BLOCK:
            return storage.read(self._url, first, last)
        joined = b"".join(self._block(n) for n in range(first // _BLOCK, -(-last // _BLOCK)))
        return joined[first % _BLOCK :][: last - first]
