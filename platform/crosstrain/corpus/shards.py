"""Documents on their way, on disk: one shard per task, finished or not there.

NAME.text     the documents' UTF-8, end to end     NAME.npy  a row per document: its length in bytes, its hash
NAME.sources  where each document was found, as a JSON list
NAME.json     what was read, kept and dropped; written last, so whoever sees it sees a finished shard
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from crosstrain.utils.errors import DataError
from crosstrain.utils.files import write_json

ROW = np.dtype([("length", "<i8"), ("hash", "<u8", 2)])  # bytes of UTF-8; BLAKE2b of them, 128 bits


def key_of(*parts: Any) -> str:
    """A name for whatever follows from `parts`, which JSON can hold."""
    return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=16).hexdigest()


class TextShard:
    """A finished shard, or one that is to be written under that name."""

    def __init__(self, folder: Path, key: str) -> None:
        self.folder, self.key = folder, key

    def __repr__(self) -> str:
        return f"TextShard({self.key})"

    def path(self, ending: str) -> Path:
        return self.folder / f"{self.key}.{ending}"

    def finished(self) -> dict[str, Any] | None:
        """What its report says; None: it is not there, or not as its writer left it."""
        try:
            report = json.loads(self.path("json").read_text())
            whole = all(self.path(ending).stat().st_size == size for ending, size in report["sizes"].items())
        except (OSError, ValueError, KeyError):
            return None
        return report if whole else None

    def write(self, documents: Iterable[tuple[bytes, str]], report: dict[str, Any]) -> dict[str, Any]:
        """Write each (text, source), then `report`, which may fill meanwhile; returns what `finished` will."""
        rows, sources = [], []
        with open(self.path("text"), "wb") as file:
            for text, source in documents:
                file.write(text)
                digest = hashlib.blake2b(text, digest_size=16).digest()
                rows.append((len(text), np.frombuffer(digest, "<u8")))
                sources.append(source)
        np.save(self.path("npy"), np.array(rows, ROW))
        self.path("sources").write_text(json.dumps(sources))
        return self.finish(report, "text", "npy", "sources")

    def finish(self, report: dict[str, Any], *endings: str) -> dict[str, Any]:
        """Write the report, last of all, with the sizes of the files of these endings; returns what `finished` will."""
        report = report | {"sizes": {ending: self.path(ending).stat().st_size for ending in endings}}
        write_json(self.path("json"), report, indent=None)
        return report

    def rows(self) -> np.ndarray:
        """`ROW` of each document."""
        return np.load(self.path("npy"), allow_pickle=False)

    def sources(self) -> list[str]:
        """Where each document was found."""
        return json.loads(self.path("sources").read_text())

    def texts(self, keep: np.ndarray | None = None) -> Iterator[str]:
        """The documents, or those whose place in the mask `keep` is true."""
        with open(self.path("text"), "rb") as file:
            for place, length in enumerate(self.rows()["length"].tolist()):
                if keep is not None and not keep[place]:
                    file.seek(length, os.SEEK_CUR)
                    continue
                data = file.read(length)
                if len(data) != length:
                    raise DataError(f"{self.path('text')} is truncated: remove it and run the same command again")
                yield data.decode()
