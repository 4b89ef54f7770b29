"""Shards of documents on disk, one per task; each is complete or absent, even if several workers write the same shard.

NAME       the documents, concatenated: texts in UTF-8, or tokens
NAME.json  counts of documents read, kept and dropped, and the length of each document: bytes of a text (with its hash
           and source), or number of tokens, including the end-of-text token. This file is written last, so a shard
           with this file is finished.
"""

import hashlib
import json
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import IO, Any

from crosstrain import replacing, write_json

_MAX_INDEXES = 64  # maximum number of shards for which document offsets are held in memory


def key_of(*parts: Any) -> str:
    """Return a name that depends on every part; the parts must be valid JSON values."""
    return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=16).hexdigest()


def file_state(file: Path) -> list[Any]:
    """Return the name, size in bytes and modification time of a file, for `key_of`."""
    found = file.stat()
    return [str(file), found.st_size, found.st_mtime_ns]


@dataclass(frozen=True)
class CorpusShard:
    """A shard with a given name; its files might not exist yet."""

    folder: Path
    key: str

    @property
    def path(self) -> Path:
        return self.folder / self.key

    def report(self) -> dict[str, Any]:
        """Return the content of a finished shard's JSON file."""
        return json.loads(self.path.with_suffix(".json").read_text())

    def finished(self) -> dict[str, Any] | None:
        """Return the report of a finished shard; None if a file is missing or has the wrong size."""
        try:
            report = self.report()
            return report if self.path.stat().st_size == report["size"] else None
        except (OSError, ValueError):
            return None

    @contextmanager
    def writing(self, report: dict[str, Any]) -> Iterator[IO[bytes]]:
        """Yield a file for the documents, then write the report; the block may add to the report."""
        with replacing(self.path) as file:
            yield file
        report["size"] = self.path.stat().st_size
        write_json(self.path.with_suffix(".json"), report, indent=None)

    def documents(self, dropped: Collection[int] = ()) -> Iterator[tuple[str, str]]:
        """Yield (text, source) of each document, except the documents at the places `dropped`."""
        report = self.report()
        with open(self.path, "rb") as file:
            for place, (length, source) in enumerate(zip(report["lengths"], report["sources"], strict=True)):
                text = file.read(length)
                if place not in dropped:
                    yield text.decode(), source

    def document(self, place: int) -> tuple[str, str]:
        """Return (text, source) of one document."""
        starts, sources = _places(self)
        with open(self.path, "rb") as file:
            file.seek(starts[place])
            return file.read(starts[place + 1] - starts[place]).decode(), sources[place]


@lru_cache(_MAX_INDEXES)
def _places(shard: CorpusShard) -> tuple[list[int], list[str]]:
    """Return the offsets of a shard's documents, and their sources."""
    report = shard.report()
    return list(accumulate(report["lengths"], initial=0)), report["sources"]
