"""Find near-duplicates: banded MinHash signatures propose pairs, and the exact similarity of a pair decides.

Signatures: Broder 1997. Bands: Leskovec, Rajaraman and Ullman, Mining of Massive Datasets, chapter 3.
"""

from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np
from xxhash import xxh3_64_intdigest

from crosstrain import require
from crosstrain.utils.files import replacing, write_json
from crosstrain.utils.rng import GOLDEN_RATIO, splitmix64

from .options import NearOptions
from .pool import CorpusStage
from .shards import CorpusShard, DocumentStore, batches

_SEED = 42
_FOUND = 0.99  # probability of finding a pair at the threshold; it is higher for more similar pairs
_PARTNERS = 8  # a document is compared with this many at the start of its bucket, and with this many just before it
_CACHED = 64 << 20  # bytes of shingle sets kept for later comparisons
_ODD = np.uint64(0x9FB21C651E98DF25)
_STEP = 0xA0761D6478BD642F


def banding(options: NearOptions) -> tuple[int, int]:
    """Return (bands, rows) with the longest bands that still find 99% of the pairs at the threshold.

    A pair of similarity s shares all r minima of a band with probability s^r, and at least one of b bands with
    probability 1 - (1 - s^r)^b.
    """
    for rows in range(options.permutations, 1, -1):
        bands = options.permutations // rows
        if 1 - (1 - options.threshold**rows) ** bands >= _FOUND:
            return bands, rows
    return options.permutations, 1


@dataclass
class SignatureStage(CorpusStage[CorpusShard, int]):
    """Write the band keys of a shard's documents: NAME.bands.npy, uint64 [bands, documents]. Reuse finished files."""

    folder: Path
    options: NearOptions

    def __call__(self, shard: CorpusShard) -> int:
        path, done = self.folder / f"{shard.key}.bands.npy", self.folder / f"{shard.key}.json"
        if not done.exists():
            with replacing(path) as file:
                np.save(file, self._keys(shard))
            write_json(done, {})
        return int(np.load(path, mmap_mode="r").shape[1])

    def _keys(self, shard: CorpusShard) -> np.ndarray:
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

    Each document is compared with the first few documents of its bucket, because a cluster keeps one of those, and with
    the few just before it.
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
    """Compute the Jaccard similarity, float64 [pairs], of pairs of document indices."""

    shards: list[CorpusShard]
    starts: np.ndarray
    options: NearOptions

    def open(self) -> None:
        self.documents = DocumentStore(self.shards, self.starts)
        self.sets: dict[int, np.ndarray] = {}  # document -> set of shingles, least recently used first
        self.held = 0  # total bytes of the sets

    def __call__(self, given: np.ndarray) -> np.ndarray:
        return np.array([jaccard(self._set(int(a)), self._set(int(b))) for a, b in given])

    def _set(self, document: int) -> np.ndarray:
        if (found := self.sets.pop(document, None)) is None:
            hashes, _ = shingles([self.documents.get(document).decode()], self.options.shingle, self.options.unit)
            found = np.unique(hashes)
            self.held += found.nbytes
        self.sets[document] = found
        while self.held > _CACHED and len(self.sets) > 1:
            self.held -= self.sets.pop(next(iter(self.sets))).nbytes
        return found


def shingles(texts: list[str], length: int, unit: str) -> tuple[np.ndarray, np.ndarray]:
    """Return (uint64 hashes of all shingles with repetitions, int64 [texts + 1] offsets of the documents).

    A shingle is `length` consecutive units in lower case. A unit is a run of characters other than whitespace
    ("words"), or one such character ("characters"). A shorter document is padded to one shingle.
    """
    hashes, owner = _words(texts, length) if unit == "words" else _characters(texts, length)
    count = len(hashes)
    sums, weight = np.zeros(count, np.uint64), 1
    for k in range(min(length, count)):
        sums[: count - k] += hashes[k:] * np.uint64(weight)
        weight = (weight * _STEP + 2 * k + 1) % (1 << 64)
    last = np.arange(count) + length - 1
    whole = (last < count) & (owner[np.minimum(last, count - 1)] == owner)
    offsets = np.searchsorted(owner[whole], np.arange(len(texts) + 1))
    return splitmix64(sums[whole] + np.uint64(GOLDEN_RATIO)), offsets.astype(np.int64)


def jaccard(first: np.ndarray, second: np.ndarray) -> float:
    """Return |A and B| / |A or B| for two sorted arrays without repetitions; 1 if both are empty."""
    common = len(np.intersect1d(first, second, assume_unique=True))
    union = len(first) + len(second) - common
    return common / union if union else 1.0


def _words(texts: list[str], least: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (hash of each word, index of its document). Any Unicode whitespace separates words.

    A document of fewer than `least` words, unless it is empty, is padded with empty words.
    """
    parts = [words and words + [""] * (least - len(words)) for words in (text.lower().split() for text in texts)]
    owner = np.repeat(np.arange(len(texts)), [len(part) for part in parts])
    hashes = map(xxh3_64_intdigest, map(str.encode, chain.from_iterable(parts)))
    return np.fromiter(hashes, np.uint64, len(owner)), owner


def _characters(texts: list[str], least: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (hash of each character, index of its document), without whitespace, padded as in `_words`."""
    lines = ["".join(text.lower().split()) for text in texts]
    parts = [np.frombuffer((line and line.ljust(least, "\0")).encode("utf-32-le"), np.uint32) for line in lines]
    owner = np.repeat(np.arange(len(texts)), [len(part) for part in parts])
    characters = np.concatenate([*parts, np.zeros(0, np.uint32)]).astype(np.uint64)
    return splitmix64(characters + np.uint64(GOLDEN_RATIO + 1)), owner
