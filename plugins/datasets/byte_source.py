"""Read byte ranges of local files, and of objects in buckets; ranges in buckets can be fetched ahead of time."""

import os
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Any

from crosstrain import open_regular
from crosstrain.utils import storage

Range = tuple[int, int]  # (first byte, last byte + 1)

_BLOCK, _BLOCKS = 1 << 16, 256  # block size and number of cached blocks, for reads that were not announced
_GAP = 1 << 16  # largest gap between ranges in one request; reading the gap takes no longer than a second request
_LARGEST = 1 << 24  # maximum size of a request for several ranges
_HELD = 64 << 20  # maximum number of bytes that are announced but not read


def byte_source(place: str | Path) -> "LocalBytes | RemoteBytes":
    """Open a file or an object. Raises OSError (such as FileNotFoundError) or StorageError."""
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
        # range -> (data of all ranges announced together, the range's position among these), oldest first
        self._announced: dict[Range, tuple[Future[list[bytes]], int]] = {}
        self._threads = ThreadPoolExecutor(8, "read ahead")
        self._block = lru_cache(_BLOCKS)(lambda n: storage.read(url, n * _BLOCK, min((n + 1) * _BLOCK, self.size)))

    def announce(self, ranges: Iterable[Range]) -> None:
        """Start fetching ranges that will be read soon; adjacent ranges share a request.

        If more than 64 MiB are announced but not read, the oldest ranges are dropped.
        """
        if new := [found for found in dict.fromkeys(ranges) if found not in self._announced]:
            future = self._threads.submit(read_ranges, self._url, new)
            self._announced |= {found: (future, place) for place, found in enumerate(new)}
        while sum(last - first for first, last in self._announced) > _HELD:
            del self._announced[next(iter(self._announced))]

    def read(self, first: int, last: int) -> bytes:
        """Return bytes [first, last), or fewer at the end of the object."""
        last = min(last, self.size)
        if (found := self._announced.pop((first, last), None)) is not None:
            parts, place = found[0].result(), found[1]
            data, parts[place] = parts[place], b""  # the announcement's other ranges stay until they are read
            return data
        if last - first > _BLOCK:
            return storage.read(self._url, first, last)
        joined = b"".join(self._block(n) for n in range(first // _BLOCK, -(-last // _BLOCK)))
        return joined[first % _BLOCK :][: last - first]


def read_ranges(url: str, ranges: Sequence[Range], gap: int = _GAP) -> list[bytes]:
    """Read the bytes of each range in concurrent requests; ranges with gaps of at most `gap` bytes share a request.

    Merged requests are limited to 16 MiB, because several concurrent requests are faster than a large one.
    """
    from fsspec.utils import merge_offset_ranges

    firsts, lasts = [first for first, _ in ranges], [last for _, last in ranges]
    _, starts, ends = merge_offset_ranges([url] * len(ranges), firsts, lasts, gap, _LARGEST)

    def action(fs: Any, path: str) -> list[bytes]:
        parts = fs.cat_ranges([path] * len(starts), starts, ends, on_error="raise")
        if [len(part) for part in parts] != [end - start for start, end in zip(starts, ends, strict=True)]:
            raise OSError("fewer bytes arrived than were requested")
        return parts

    parts = storage.tried(url, action)
    found = ((bisect_right(starts, first) - 1, first, last) for first, last in ranges)
    return [parts[i][first - starts[i] : last - starts[i]] for i, first, last in found]
