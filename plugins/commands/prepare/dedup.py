"""Find the documents to drop because they are equal or similar to an earlier document that stays.

For near-duplicates, banded MinHash signatures propose pairs, and the exact similarity of a pair decides. Signatures:
Broder 1997. Bands: Leskovec, Rajaraman and Ullman, Mining of Massive Datasets, chapter 3.
"""

from collections.abc import Callable
from functools import cached_property, lru_cache, partial
from itertools import repeat
from typing import Any

from crosstrain import require

from .options import DedupOptions, NearOptions
from .pool import run_stage
from .shards import CorpusShard
from .stats import EXAMPLES, Counts

_SEED = 42
_FOUND = 0.99  # probability of finding a pair at the threshold; it is higher for pairs that are more similar
_MOST_PAIRS = 256  # compare a document with at most this many documents that share a band, the earliest first
_CACHED = 4096  # sets of shingles kept for later comparisons

Place = tuple[int, int]  # a document's shard number, and its place in the shard


def find_duplicates(
    options: DedupOptions, shards: list[CorpusShard], workers: int, advance: Callable[[int], Any]
) -> tuple[list[list[int]], dict[str, Any]]:
    """Compare all documents of all shards; the first of equal or similar documents stays.

    Return the places of the documents to drop in each shard, and a report with counts and examples per kind.
    Memory use: about 250 bytes per document, and 2 KB more to find near-duplicates.
    """
    search = _Search(options.near or NearOptions(), shards)
    signatures = repeat([]) if options.near is None else run_stage(partial(_signatures, options.near), shards, workers)
    for number, (shard, signed) in enumerate(zip(shards, signatures, strict=False)):
        hashes = shard.report()["hashes"]
        for place, digest in enumerate(hashes):
            if not (options.exact and search.is_equal((number, place), digest)) and signed:
                search.compare((number, place), signed[place])
        advance(len(hashes))
    return search.dropped, search.counts.plain["dropped"]


class _Search:
    def __init__(self, near: NearOptions, shards: list[CorpusShard]) -> None:
        self.near, self.shards = near, shards
        self.first: dict[str, Place] = {}  # hash -> first document with this hash
        self.kept: list[Place] = []  # documents in the index
        self.dropped: list[list[int]] = [[] for _ in shards]  # places in each shard
        self.counts = Counts()
        self.shingles = lru_cache(_CACHED)(lambda document: shingles(self._read(document)[0], near))

    @cached_property
    def index(self) -> Any:
        """An index of signatures by their bands."""
        bands, rows = banding(self.near)
        return require("rensa", "finding near-duplicates").RMinHashLSH(
            threshold=self.near.threshold, num_perm=bands * rows, num_bands=bands
        )

    def is_equal(self, document: Place, digest: str) -> bool:
        """Drop a document if an earlier one has the same 128-bit hash; return whether it was dropped.

        No collision of these hashes is known.
        """
        first = self.first.setdefault(digest, document)
        if first != document:
            self._drop("exact", document, first, "equal to")
        return first != document

    def compare(self, document: Place, signature: Any) -> None:
        """Drop a document that is similar to a document in the index; otherwise add it to the index."""
        for key in sorted(self.index.query(signature))[:_MOST_PAIRS]:
            similarity = jaccard(self.shingles(self.kept[key]), self.shingles(document))
            if similarity >= self.near.threshold:
                self._drop("near", document, self.kept[key], f"similarity {similarity:.3f} to")
                return
        self.index.insert(len(self.kept), signature)
        self.kept.append(document)

    def _drop(self, kind: str, document: Place, like: Place, how: str) -> None:
        text, source = self._read(document)
        # Only a few examples are kept, so that few documents are read out of order.
        if self.counts.plain["dropped"].get(kind, {"documents": 0})["documents"] < EXAMPLES:
            kept, other = self._read(like)
            how = f"{how} {other}: {' '.join(kept[:80].split())}"
        self.counts.drop(kind, len(text.encode()), source, how, text)
        self.dropped[document[0]].append(document[1])

    def _read(self, document: Place) -> tuple[str, str]:
        return self.shards[document[0]].document(document[1])


def _signatures(options: NearOptions, shard: CorpusShard) -> list[Any]:
    """Return the MinHash signature of each document of a shard."""
    minhash = require("rensa", "finding near-duplicates").RMinHash
    bands, rows = banding(options)
    found = []
    for text, _ in shard.documents():
        signature = minhash(num_perm=bands * rows, seed=_SEED)
        signature.update(shingles(text, options))
        found.append(signature)
    return found


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


def shingles(text: str, options: NearOptions) -> set[str]:
    """Return the shingles of a text: `shingle` consecutive units in lower case, or all units of a shorter text.

    A unit is a run of characters other than whitespace ("words"), or one such character ("characters").
    """
    words = text.lower().split()
    units = words if options.unit == "words" else list("".join(words))
    return {" ".join(units[k : k + options.shingle]) for k in range(max(1, len(units) - options.shingle + 1))}


def jaccard(first: set[str], second: set[str]) -> float:
    """Return |A and B| / |A or B| for two sets that are not empty."""
    return len(first & second) / len(first | second)
