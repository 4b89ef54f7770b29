"""Near-duplicates: MinHash signatures in bands propose pairs, and the true similarity of a pair decides.

Broder 1997 for the signatures, Leskovec, Rajaraman and Ullman, Mining of Massive Datasets, chapter 3, for the bands.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from crosstrain.corpus.dedup.shingles import jaccard, shingles
from crosstrain.corpus.options import NearOptions
from crosstrain.corpus.pool import CorpusStage
from crosstrain.corpus.shards import DocumentStore, TextShard
from crosstrain.corpus.tokenize_stage import batches
from crosstrain.utils.files import write_json
from crosstrain.utils.optional_deps import require

_SEED = 42
_FOUND = 0.99  # of the pairs at the threshold; those above are found more surely
_PARTNERS = 8  # of a document in one bucket: the first ones there, and those just before it
_CACHED = 64 << 20  # bytes of shingle sets that are kept for the next comparison
_ODD = np.uint64(0x9FB21C651E98DF25)


def banding(options: NearOptions) -> tuple[int, int]:
    """Return (bands, rows) of the longest bands that still find 99 % of the pairs at the threshold.

    A pair of similarity s shares all of a band's r minima with probability s^r, and at least one of b bands with
    1 - (1 - s^r)^b.
    """
    for rows in range(options.permutations, 1, -1):
        bands = options.permutations // rows
        if 1 - (1 - options.threshold**rows) ** bands >= _FOUND:
            return bands, rows
    return options.permutations, 1


@dataclass
class SignatureStage(CorpusStage[TextShard, int]):
    """Write the band keys of a shard's documents: NAME.bands.npy, uint64 [bands, documents]. Finished files stay."""

    folder: Path
    options: NearOptions

    def __call__(self, shard: TextShard) -> int:
        path, done = self.folder / f"{shard.key}.bands.npy", self.folder / f"{shard.key}.json"
        if not done.exists():
            np.save(path, self._keys(shard))
            write_json(done, {})
        return int(np.load(path, mmap_mode="r").shape[1])

    def _keys(self, shard: TextShard) -> np.ndarray:
        bands, rows = banding(self.options)
        minhash = require("rensa", "finding near-duplicates").RMinHash
        found = [np.zeros((bands, 0), np.uint64)]
        for texts in batches(shard.texts()):
            hashes, offsets = shingles(texts, self.options.shingle, self.options.unit)
            digest = minhash.digest_matrix_from_flat_token_hashes(
                hashes, offsets.astype(np.uint64), num_perm=self.options.permutations, seed=_SEED
            )
            minima = np.array(digest.to_rows(), np.uint64)[:, : bands * rows].reshape(len(texts), bands, rows)
            keys = np.zeros((len(texts), bands), np.uint64)
            for k in range(rows):
                keys = (keys ^ minima[:, :, k]) * _ODD
                keys ^= keys >> np.uint64(29)
            found.append(keys.T)
        return np.concatenate(found, axis=1)


def pairs(rows: np.ndarray) -> np.ndarray:
    """Return documents to compare, int64 [pairs, 2] (earlier, later), from rows (key, document) in ascending order.

    Each is compared with the first few of its bucket, of which a cluster keeps one, and with the few before it.
    """
    keys, documents = rows[:, 0], rows[:, 1].astype(np.int64)
    places = np.arange(len(rows))
    starts = np.flatnonzero(np.concatenate(([True], keys[1:] != keys[:-1])))
    start = starts[np.searchsorted(starts, places, side="right") - 1]
    found = [np.zeros((0, 2), np.int64)]
    for k in range(_PARTNERS):
        for partner in (start + k, places - 1 - k):
            valid = (partner >= start) & (partner < places)
            found.append(np.stack((documents[partner[valid]], documents[places[valid]]), axis=1))
    return np.unique(np.concatenate(found), axis=0)


@dataclass
class SimilarityStage(CorpusStage[np.ndarray, np.ndarray]):
    """Compute the Jaccard similarity of pairs of documents, given by their numbers, float64 [pairs]."""

    index: Path  # written by `DocumentStore.save`
    options: NearOptions

    def open(self) -> None:
        self.sets: OrderedDict[int, np.ndarray] = OrderedDict()
        self.held = 0
        self.documents = DocumentStore.load(self.index)

    def __call__(self, given: np.ndarray) -> np.ndarray:
        return np.array([self._similarity(int(a), int(b)) for a, b in given])

    def _similarity(self, first: int, second: int) -> float:
        a, b = self._set(first), self._set(second)
        if min(len(a), len(b)) < self.options.threshold * max(len(a), len(b)):
            return 0.0  # even if all of the smaller set is in common
        return jaccard(a, b)

    def _set(self, document: int) -> np.ndarray:
        if document in self.sets:
            self.sets.move_to_end(document)
            return self.sets[document]
        hashes, _ = shingles([self.documents.get(document).decode()], self.options.shingle, self.options.unit)
        self.sets[document] = found = np.unique(hashes)
        self.held += found.nbytes
        while self.held > _CACHED and len(self.sets) > 1:
            self.held -= self.sets.popitem(last=False)[1].nbytes
        return found
