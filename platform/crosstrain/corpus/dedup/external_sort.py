"""Sort rows by their key, on disk."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import numpy as np

MEMORY = 64 << 20  # bytes of rows that are sorted at once


class ExternalSort:
    """A sorter of rows of two or three uint64; the first number is the key.

    The rows are spread over files by their keys, each file small enough to be sorted in memory. A context manager:
    the files are removed when its block ends.
    """

    def __init__(self, folder: Path, columns: int, rows: int, *, highest: int = 1 << 64, memory: int = MEMORY) -> None:
        """Make the folder. rows: expected number. highest: bound of the keys, which are spread evenly below it."""
        self.folder, self.columns, self.highest = folder, columns, highest
        self.parts = max(1, -(-rows * columns * 8 // memory))
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def add(self, *columns: np.ndarray) -> None:
        """Append rows, given column by column."""
        rows = np.stack([np.asarray(column).astype(np.uint64) for column in columns], axis=1)
        width = -(-self.highest // self.parts)
        part = (rows[:, 0] // np.uint64(width)).astype(np.int64) if self.parts > 1 else np.zeros(len(rows), np.int64)
        order = np.argsort(part, kind="stable")
        bounds = np.searchsorted(part[order], np.arange(self.parts + 1))
        for number in np.unique(part):
            with open(self.folder / str(number), "ab") as file:
                file.write(rows[order[bounds[number] : bounds[number + 1]]].tobytes())

    def sorted(self) -> Iterator[np.ndarray]:
        """Yield all rows, uint64 [rows, columns], in ascending order, a file at a time; no key is in two files."""
        for number in range(self.parts):
            path = self.folder / str(number)
            if path.exists():
                rows = np.fromfile(path, np.uint64).reshape(-1, self.columns)
                yield rows[np.lexsort(rows.T[::-1])]
