"""Shards of documents on disk, one per task; each is complete or absent, even if several workers write the same one.

NAME.text     the documents in UTF-8, concatenated    NAME.npy  a row per document: its length in bytes, its hash
NAME.sources  source of each document, as a JSON list
NAME.json     counts of documents read, kept and dropped; written last, so a shard with this file is finished

A shard of tokens has its documents in NAME.bin, and its rows are their lengths in tokens.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from crosstrain import DataError
from crosstrain.utils.files import replacing, write_atomically, write_json

_MAX_INDEXES = 64  # maximum number of shard indexes held in memory
ROW = np.dtype([("length", "<i8"), ("hash", "<u8", 2)])  # number of UTF-8 bytes; their 128-bit BLAKE2b hash


def key_of(*parts: Any) -> str:
    """Return a name that depends on every part; the parts must be valid JSON values."""
    return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=16).hexdigest()


class CorpusShard:
    """A shard with a given name; its files may not exist yet."""

    def __init__(self, folder: Path, key: str) -> None:
        self.folder, self.key = folder, key

    def path(self, ending: str) -> Path:
        return self.folder / f"{self.key}.{ending}"

    def finished(self) -> dict[str, Any] | None:
        """Return the report of a finished shard; None if a file is missing or has the wrong size."""
        try:
            report = json.loads(self.path("json").read_text())
            whole = all(self.path(ending).stat().st_size == size for ending, size in report["sizes"].items())
        except (OSError, ValueError, KeyError):
            return None
        return report if whole else None

    def write(self, documents: Iterable[tuple[bytes, str]], report: dict[str, Any]) -> dict[str, Any]:
        """Write each (text, source), then `report`, which the iteration may fill; return what `finished` returns."""
        rows, sources = [], []
        with replacing(self.path("text")) as file:
            for text, source in documents:
                file.write(text)
                digest = hashlib.blake2b(text, digest_size=16).digest()
                rows.append((len(text), np.frombuffer(digest, "<u8")))
                sources.append(source)
        with replacing(self.path("npy")) as file:
            np.save(file, np.array(rows, ROW))
        write_atomically(self.path("sources"), json.dumps(sources))
        return self.finish(report, "text", "npy", "sources")

    def finish(self, report: dict[str, Any], *endings: str) -> dict[str, Any]:
        """Add the sizes of the files with these endings to the report, write it last, and return it."""
        report = report | {"sizes": {ending: self.path(ending).stat().st_size for ending in endings}}
        write_json(self.path("json"), report, indent=None)
        return report

    def rows(self) -> np.ndarray:
        """Return a `ROW` for each document; in a shard of tokens, its int32 length with the end-of-text token."""
        return np.load(self.path("npy"), allow_pickle=False)

    def sources(self) -> list[str]:
        return json.loads(self.path("sources").read_text())

    def texts(self, keep: np.ndarray | None = None) -> Iterator[str]:
        """Yield the documents, or only those selected by the mask `keep`."""
        with open(self.path("text"), "rb") as file:
            for place, length in enumerate(self.rows()["length"].tolist()):
                if keep is not None and not keep[place]:
                    file.seek(length, os.SEEK_CUR)
                    continue
                data = file.read(length)
                if len(data) != length:
                    raise DataError(f"{self.path('text')} is truncated: remove it and run the same command again")
                yield data.decode()


def batches(texts: Iterator[str], characters: int = 1 << 20) -> Iterator[list[str]]:
    """Yield lists of documents of about `characters` characters, without reading further ahead."""
    batch: list[str] = []
    held = 0
    for text in texts:
        batch.append(text)
        held += len(text)
        if held >= characters:
            yield batch
            batch, held = [], 0
    if batch:
        yield batch


class DocumentStore:
    """Documents of several shards, by index. `starts`: index of each shard's first document, then the total number."""

    def __init__(self, shards: list[CorpusShard], starts: np.ndarray) -> None:
        self.shards, self.starts = shards, starts
        self._offsets = lru_cache(_MAX_INDEXES)(
            lambda number: np.concatenate(([0], np.cumsum(shards[number].rows()["length"])))
        )

    def get(self, document: int) -> bytes:
        """Return a document as UTF-8 bytes."""
        number, place = self._find(document)
        start, stop = self._offsets(number)[place : place + 2].tolist()
        with open(self.shards[number].path("text"), "rb") as file:
            file.seek(start)
            return file.read(stop - start)

    def source(self, document: int) -> str:
        number, place = self._find(document)
        return self.shards[number].sources()[place]

    def _find(self, document: int) -> tuple[int, int]:
        """Return (index of the shard, index of the document in the shard)."""
        number = int(np.searchsorted(self.starts, document, side="right")) - 1
        return number, document - int(self.starts[number])
