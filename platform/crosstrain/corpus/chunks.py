"""Cut large files into chunks between two records: lines, pages, or any units that a byte string separates."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from crosstrain.corpus import reader
from crosstrain.corpus.io import is_compressed, opened
from crosstrain.corpus.reader import Chunk
from crosstrain.utils.errors import DataError

_LOOK = 1 << 16  # bytes read at once in search of a separator


def split_file(file: Path, separator: bytes, size: int | None = None) -> Iterator[Chunk]:
    """Yield chunks of at least `size` bytes (default: a task's; the last may be shorter) that end with a separator.

    A chunk of a compressed file carries its bytes, because such a file can only be read from the beginning. One chunk
    is held at a time.
    """
    split = _split_compressed if is_compressed(file) else _split_plain
    yield from split(file, separator, size or reader.TASK_BYTES)


def _split_plain(file: Path, separator: bytes, size: int) -> Iterator[Chunk]:
    end, start = file.stat().st_size, 0
    with opened(file) as stream:
        while start < end:
            least = min(start + size, end)
            position = max(start, least - 2 * len(separator))
            stream.seek(position)
            near, stop = stream.read(_LOOK), -1
            while (stop := _boundary(near, separator, least - position)) < 0:
                more = stream.read(len(near))
                if not more:
                    break
                near += more
            stop = end if stop < 0 else position + stop
            yield Chunk(file, start, stop)
            start = stop


def _split_compressed(file: Path, separator: bytes, size: int) -> Iterator[Chunk]:
    start, held, least = 0, bytearray(), size
    with opened(file) as stream:
        while block := stream.read(size):
            held += block
            while len(held) >= least:
                stop = _boundary(held, separator, least)
                if stop < 0:
                    least = 2 * len(held)
                    break
                yield Chunk(file, start, start + stop, bytes(held[:stop]))
                del held[:stop]
                start, least = start + stop, size
    if held:
        yield Chunk(file, start, start + len(held), bytes(held))


def _boundary(data: bytes | bytearray, separator: bytes, least: int) -> int:
    """Return the end of the first separator that ends at `least` or later; -1 if there is none.

    A separator that another one overlaps from the left is passed over: splitting from the beginning may not see it.
    """
    length = len(separator)
    found = data.find(separator, max(0, least - length))
    while found >= 0 and data.find(separator, max(0, found - length + 1)) != found:
        found = data.find(separator, found + 1)
    return found + length if found >= 0 else -1


def decoded(chunk: Chunk) -> str:
    """Decode a chunk, without a byte order mark at the file's beginning. DataError names the first byte not UTF-8."""
    try:
        text = chunk.read().decode()
    except UnicodeDecodeError as error:
        raise DataError(f"{chunk.file} is not UTF-8 text: invalid at byte {chunk.start + error.start}") from None
    return text.removeprefix("\ufeff") if chunk.start == 0 else text


def line_number(file: Path, offset: int) -> int:
    """Return the number, from 1, of the line at a byte of a file's content; reads the file up to there."""
    number, left = 1, offset
    with opened(file) as stream:
        while left and (block := stream.read(min(left, 1 << 22))):
            number += block.count(b"\n")
            left -= len(block)
    return number
