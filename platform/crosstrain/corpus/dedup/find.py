"""The documents that are dropped because an earlier one, which stays, is equal or nearly so."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from crosstrain.config.schema import to_plain
from crosstrain.corpus.dedup import minhash
from crosstrain.corpus.dedup.documents import DocumentStore
from crosstrain.corpus.dedup.external_sort import ExternalSort
from crosstrain.corpus.options import DedupOptions, NearOptions
from crosstrain.corpus.pool import WorkerPool
from crosstrain.corpus.shards import TextShard, key_of
from crosstrain.corpus.stats import Counts

Advance = Callable[[int], Any]


@dataclass
class Duplicates:
    """A byte per document, 1 where it goes; None: all stay. `report`: how many of which kind, with examples."""

    marks: np.ndarray | None
    report: dict[str, Any]

    @property
    def digest(self) -> str:
        """Changes with what goes."""
        return "" if self.marks is None else hashlib.blake2b(self.marks.data, digest_size=16).hexdigest()

    def left(self, shards: list[TextShard]) -> Iterator[tuple[TextShard, np.ndarray | None]]:
        """Each shard with a mask of its documents that stay."""
        start = 0
        for shard in shards:
            if self.marks is None:
                yield shard, None
                continue
            stop = start + len(shard.rows())
            yield shard, np.array(self.marks[start:stop] == 0)
            start = stop


def find_duplicates(
    options: DedupOptions, shards: list[TextShard], folder: Path, pool: WorkerPool, advance: Advance
) -> Duplicates:
    """Compare all documents of all shards; of those alike the first one stays.

    In memory are only the names of the shards, one per 8 MB of input; the rest is on disk, in `folder`.
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
    def __init__(self, shards: list[TextShard], starts: np.ndarray, folder: Path, marks: np.ndarray) -> None:
        self.shards, self.starts, self.folder, self.marks = shards, starts, folder, marks
        self.texts = DocumentStore(shards[0].folder, [shard.key for shard in shards], starts)
        self.counts = Counts()

    def mark_equal(self) -> None:
        """By 128 bits of hash, which no two different documents have ever been seen to share."""
        with ExternalSort(self.folder / "equal", 3, len(self.marks)) as buckets:
            for start, shard in zip(self.starts, self.shards, strict=False):
                hashes = shard.rows()["hash"]
                buckets.add(hashes[:, 0], hashes[:, 1], start + np.arange(len(hashes)))
            for rows in buckets.sorted():  # those alike in the order of their numbers
                again = (rows[1:, :2] == rows[:-1, :2]).all(axis=1)
                numbers = rows[:, 2].astype(np.int64)
                first = np.maximum.accumulate(np.where(np.concatenate(([True], ~again)), np.arange(len(rows)), 0))
                for place in np.flatnonzero(again) + 1:
                    self._mark("exact", int(numbers[place]), int(numbers[first[place]]), "equal to")

    def mark_near(self, options: NearOptions, pool: WorkerPool, advance: Advance) -> None:
        """Of a pair alike the later document goes, if the earlier one stays."""
        folder = self.folder / f"near-{key_of(to_plain(options))}"
        folder.mkdir(exist_ok=True)
        sign = minhash.SignatureStage(self.texts.folder, folder, options)
        for signed in pool.run(sign, self.texts.keys):
            advance(signed)
        bands, _ = minhash.banding(options)
        total = len(self.marks)
        self.texts.save(folder / "texts.json")
        compare = minhash.SimilarityStage(folder / "texts.json", options)
        with ExternalSort(self.folder / "pairs", 2, 4 * total, highest=total) as found:
            for band in range(bands):
                with ExternalSort(self.folder / "band", 2, total) as buckets:
                    for number, key in enumerate(self.texts.keys):
                        keys = np.load(folder / f"{key}.bands.npy", mmap_mode="r")[band]
                        documents = np.arange(self.starts[number], self.starts[number + 1])
                        new = self.marks[documents] == 0
                        buckets.add(keys[new], documents[new])
                    for rows in buckets.sorted():
                        proposed = minhash.pairs(rows)
                        found.add(proposed[:, 1], proposed[:, 0])  # by the later one
            for rows in found.sorted():
                rows = np.unique(rows, axis=0)[:, ::-1].astype(np.int64)
                chunks = list(minhash.in_chunks(rows))
                for chunk, alike in zip(chunks, pool.run(compare, chunks), strict=True):
                    for (first, second), similarity in zip(chunk.tolist(), alike.tolist(), strict=True):
                        if similarity >= options.threshold and not self.marks[first] and not self.marks[second]:
                            self._mark("near", second, first, f"similarity {similarity:.3f} to")

    def _mark(self, kind: str, document: int, like: int, how: str) -> None:
        """Drop a document for its likeness to an earlier one."""
        self.marks[document] = 1
        text, source, why = self.texts.get(document), "", ""
        if self.counts.wants_example(kind):
            kept = " ".join(self.texts.get(like)[:80].decode(errors="ignore").split())
            source, why = self.texts.source(document), f"{how} {self.texts.source(like)}: {kept}"
        self.counts.drop(kind, len(text), source, why, text.decode())
