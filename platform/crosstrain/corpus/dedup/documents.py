"""Documents by number, wherever their shard is."""

from __future__ import annotations

import json
from collections import OrderedDict
from pathlib import Path

import numpy as np

from crosstrain.corpus.shards import TextShard
from crosstrain.utils.files import write_json

_INDEXES = 64  # of shards, kept


class DocumentStore:
    """All documents of all shards, numbered in order. `starts` [shards + 1] has the number of each shard's first."""

    def __init__(self, folder: Path, keys: list[str], starts: np.ndarray) -> None:
        self.folder, self.keys, self.starts = folder, keys, starts
        self.offsets: OrderedDict[int, np.ndarray] = OrderedDict()

    def save(self, path: Path) -> None:
        """Write down which shards these are, for other processes."""
        write_json(path, {"folder": str(self.folder), "keys": self.keys, "starts": self.starts.tolist()}, indent=None)

    @classmethod
    def load(cls, path: Path) -> DocumentStore:
        """As `save` wrote it."""
        found = json.loads(path.read_text())
        return cls(Path(found["folder"]), found["keys"], np.array(found["starts"], np.int64))

    def get(self, document: int) -> bytes:
        """UTF-8 of a document."""
        number, (start, stop) = self._place(document)
        with open(TextShard(self.folder, self.keys[number]).path("text"), "rb") as file:
            file.seek(start)
            return file.read(stop - start)

    def source(self, document: int) -> str:
        """Where a document was found."""
        number, _ = self._place(document)
        return TextShard(self.folder, self.keys[number]).sources()[document - int(self.starts[number])]

    def _place(self, document: int) -> tuple[int, tuple[int, int]]:
        number = int(np.searchsorted(self.starts, document, side="right")) - 1
        if number not in self.offsets:
            lengths = TextShard(self.folder, self.keys[number]).rows()["length"]
            self.offsets[number] = np.concatenate(([0], np.cumsum(lengths)))
            if len(self.offsets) > _INDEXES:
                self.offsets.popitem(last=False)
        row = document - int(self.starts[number])
        return number, (int(self.offsets[number][row]), int(self.offsets[number][row + 1]))
