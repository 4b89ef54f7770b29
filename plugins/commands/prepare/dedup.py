"""Find the documents to drop because they are equal or similar to an earlier document that stays."""

import hashlib
import secrets
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

from crosstrain.config.schema import to_plain
from crosstrain.utils.files import replacing

from . import minhash
from .options import DedupOptions, NearOptions
from .pool import CorpusStage, WorkerPool
from .shards import CorpusShard, DocumentStore, key_of
from .stats import Counts

_PAIRS = 2048  # pairs in one work item
SORTED_BYTES = 64 << 20  # bytes of rows that are sorted in memory at once


@dataclass
class Duplicates:
    """Marks of one byte per document, 1 to drop it (None: all stay), and a report with counts and examples per kind."""

    marks: np.ndarray | None
    report: dict[str, Any]

    @property
    def digest(self) -> str:
        """A hash of the marks."""
        return "" if self.marks is None else hashlib.blake2b(self.marks.data, digest_size=16).hexdigest()

    def left(self, shards: list[CorpusShard]) -> Iterator[tuple[CorpusShard, np.ndarray | None]]:
        """Yield each shard with a mask of the documents to keep; None: keep all of them."""
        start = 0
        for shard in shards:
            stop = start if self.marks is None else start + len(shard.rows())
            yield shard, None if self.marks is None else np.array(self.marks[start:stop] == 0)
            start = stop


def find_duplicates(
    options: DedupOptions, shards: list[CorpusShard], folder: Path, pool: WorkerPool, advance: Callable[[int], Any]
) -> Duplicates:
    """Compare all documents of all shards; the first of equal or similar documents stays.

    Memory holds only the names of the shards, one per 8 MB of input. The rest is on disk, in `folder`.
    """
    starts = np.concatenate(([0], np.cumsum([len(shard.rows()) for shard in shards]))).astype(np.int64)
    total = int(starts[-1])
    if not total:
        return Duplicates(None, {})
    search = _Search(shards, starts, folder, np.memmap(folder / "repeated", np.uint8, "w+", shape=(total,)))
    if options.exact:
        search.mark_equal()
    if options.near is not None:
        search.mark_near(options.near, pool, advance)
    return Duplicates(search.marks, search.counts.plain["dropped"])


class _Search:
    def __init__(self, shards: list[CorpusShard], starts: np.ndarray, folder: Path, marks: np.memmap) -> None:
        self.shards, self.starts, self.folder, self.marks = shards, starts, folder, marks
        self.documents = DocumentStore(shards, starts)
        self.counts = Counts()

    def mark_equal(self) -> None:
        """Mark documents with equal 128-bit hashes; no collision of these hashes is known."""
        with ExternalSort(self.folder / "equal", 3, len(self.marks)) as sorter:
            for start, shard in zip(self.starts, self.shards, strict=False):
                hashes = shard.rows()["hash"]
                sorter.add(hashes[:, 0], hashes[:, 1], start + np.arange(len(hashes)))
            for rows in sorter.sorted():  # documents with equal hashes keep their order
                new = np.concatenate(([True], (rows[1:, :2] != rows[:-1, :2]).any(axis=1)))
                first = np.maximum.accumulate(np.where(new, np.arange(len(rows)), 0))
                for place in np.flatnonzero(~new):
                    self._mark("exact", int(rows[place, 2]), int(rows[first[place], 2]), "equal to")

    def mark_near(self, options: NearOptions, pool: WorkerPool, advance: Callable[[int], Any]) -> None:
        """Mark the later document of each similar pair if the earlier one stays."""
        folder = self.folder / f"near-{key_of(to_plain(options))}"
        folder.mkdir(exist_ok=True)
        for signed in pool.run(minhash.SignatureStage(folder, options), self.shards):
            advance(signed)
        total = len(self.marks)
        similarity = minhash.SimilarityStage(self.shards, self.starts, options)
        self.marks.flush()  # the stage reads the marks of equal documents
        bands = BandStage(folder, self.shards, self.starts, Path(str(self.marks.filename)))
        with ExternalSort(self.folder / "pairs", 2, 4 * total, highest=total) as candidates:
            for path in pool.run(bands, range(minhash.banding(options)[0])):
                with open(path, "rb") as file:
                    while len(pairs := np.fromfile(file, np.int64, SORTED_BYTES // 8).reshape(-1, 2)):
                        candidates.add(pairs[:, 1], pairs[:, 0])  # sorted by the later document
                path.unlink()
            for rows in candidates.sorted():
                rows = np.unique(rows, axis=0)[:, ::-1].astype(np.int64)
                chunks = [rows[start : start + _PAIRS] for start in range(0, len(rows), _PAIRS)]
                for chunk, found in zip(chunks, pool.run(similarity, chunks), strict=True):
                    for (first, second), share in zip(chunk.tolist(), found.tolist(), strict=True):
                        if share >= options.threshold and not self.marks[first] and not self.marks[second]:
                            self._mark("near", second, first, f"similarity {share:.3f} to")

    def _mark(self, kind: str, document: int, like: int, how: str) -> None:
        """Drop a document because of an earlier one."""
        self.marks[document] = 1
        text, source, reason = self.documents.get(document), "", ""
        if self.counts.wants_example(kind):
            kept = " ".join(self.documents.get(like)[:80].decode(errors="ignore").split())
            source, reason = self.documents.source(document), f"{how} {self.documents.source(like)}: {kept}"
        self.counts.drop(kind, len(text), source, reason, text.decode())


@dataclass
class BandStage(CorpusStage[int, Path]):
    """Write the pairs of unmarked documents that share a band's key: int64 [pairs, 2], one file per band."""

    folder: Path  # holds the files of band keys
    shards: list[CorpusShard]
    starts: np.ndarray
    marks: Path

    def open(self) -> None:
        self.marked = np.memmap(self.marks, np.uint8, "r")

    def __call__(self, band: int) -> Path:
        place = self.folder / f"band-{band}-{secrets.token_hex(4)}"  # two workers may process the same band
        with ExternalSort(place, 2, len(self.marked)) as sorter:
            for number, shard in enumerate(self.shards):
                keys = np.load(self.folder / f"{shard.key}.bands.npy", mmap_mode="r")[band]
                documents = np.arange(self.starts[number], self.starts[number + 1])
                new = self.marked[documents] == 0
                sorter.add(keys[new], documents[new])
            with replacing(self.folder / f"pairs-{band}") as file:
                for rows in sorter.sorted():
                    file.write(minhash.pairs(rows).tobytes())
        return self.folder / f"pairs-{band}"


class ExternalSort:
    """Sorts rows of two or three uint64 on disk; the first column is the key.

    Rows are assigned to files by key, and each file is small enough to sort in memory. As a context manager, it removes
    the files at the end of the block.
    """

    def __init__(self, folder: Path, columns: int, rows: int, highest: int = 1 << 64) -> None:
        """Create the folder. rows: expected number of rows. highest: upper bound on the keys (assumed uniform)."""
        self.folder, self.columns, self.highest = folder, columns, highest
        self.parts = max(1, -(-rows * columns * 8 // SORTED_BYTES))
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
        """Yield all rows, uint64 [rows, columns], in ascending order, one file at a time; no key is in two files."""
        for number in range(self.parts):
            path = self.folder / str(number)
            if path.exists():
                rows = np.fromfile(path, np.uint64).reshape(-1, self.columns)
                yield rows[np.lexsort(rows.T[::-1])]
