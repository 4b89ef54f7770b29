"""Find the documents to drop because they are equal or similar to an earlier document that stays.

For near-duplicates, banded MinHash signatures propose pairs, and the exact similarity of a pair decides. Signatures:
Broder 1997. Bands: Leskovec, Rajaraman and Ullman, Mining of Massive Datasets, chapter 3.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import repeat
from typing import Any

from crosstrain import require

from .options import DedupOptions, NearOptions
from .pool import CorpusStage, WorkerPool
from .shards import CorpusShard
from .stats import EXAMPLES, SNIPPET

_SEED = 42
_FOUND = 0.99  # probability of finding a pair at the threshold; it is higher for more similar pairs
_MOST_PAIRS = 256  # a document is compared with at most this many that share a band, the earliest ones
_CACHED = 4096  # sets of shingles kept for later comparisons

Place = tuple[int, int]  # of a document: number of its shard, place in the shard


@dataclass(frozen=True)
class Duplicates:
    """The places of the documents to drop in each shard, and a report with counts and examples per kind."""

    dropped: list[list[int]]
    report: dict[str, Any]


def find_duplicates(
    options: DedupOptions, shards: list[CorpusShard], pool: WorkerPool, advance: Callable[[int], Any]
) -> Duplicates:
    """Compare all documents of all shards; the first of equal or similar documents stays.

    Memory holds about 250 bytes per document for equal ones, and 2 KB more for similar ones.
    """
    search = _Search(options.near or NearOptions(), shards)
    signatures = repeat([]) if options.near is None else pool.run(SignatureStage(options.near), shards)
    for number, (shard, signed) in enumerate(zip(shards, signatures, strict=False)):
        hashes = shard.report()["hashes"]
        for place, digest in enumerate(hashes):
            if not (options.exact and search.is_equal((number, place), digest)) and signed:
                search.compare((number, place), signed[place])
        advance(len(hashes))
    return search.result()


class _Search:
    def __init__(self, near: NearOptions, shards: list[CorpusShard]) -> None:
        self.near, self.shards = near, shards
        self.first: dict[str, Place] = {}  # hash -> the first document with it
        self.kept: list[Place] = []  # documents in the index
        self.found: dict[str, list[tuple[Place, Place, str]]] = {}  # kind -> (document to drop, one like it, how)
        self.shingles = lru_cache(_CACHED)(lambda document: shingles(self._read(document)[0], near))

    @cached_property
    def index(self) -> Any:
        """An index of signatures by their bands."""
        bands, rows = banding(self.near)
        lsh = require("rensa", "finding near-duplicates").RMinHashLSH
        return lsh(threshold=self.near.threshold, num_perm=bands * rows, num_bands=bands)

    def is_equal(self, document: Place, digest: str) -> bool:
        """Drop a document whose 128-bit hash an earlier one has; no collision of these hashes is known."""
        first = self.first.setdefault(digest, document)
        if first != document:
            self.found.setdefault("exact", []).append((document, first, "equal to"))
        return first != document

    def compare(self, document: Place, signature: Any) -> None:
        """Drop a document if an earlier one that stays is similar; otherwise add it to the index."""
        for key in sorted(self.index.query(signature))[:_MOST_PAIRS]:
            similarity = jaccard(self.shingles(self.kept[key]), self.shingles(document))
            if similarity >= self.near.threshold:
                found = document, self.kept[key], f"similarity {similarity:.3f} to"
                self.found.setdefault("near", []).append(found)
                return
        self.index.insert(len(self.kept), signature)
        self.kept.append(document)

    def result(self) -> Duplicates:
        dropped: list[list[int]] = [[] for _ in self.shards]
        report = {}
        for kind, found in self.found.items():
            for (number, place), _, _ in found:
                dropped[number].append(place)
            size = sum(len(self._read(document)[0].encode()) for document, _, _ in found)
            examples = [self._example(*pair) for pair in found[:EXAMPLES]]
            report[kind] = {"documents": len(found), "bytes": size, "examples": examples}
        return Duplicates([sorted(places) for places in dropped], report)

    def _example(self, document: Place, like: Place, how: str) -> dict[str, str]:
        text, source = self._read(document)
        kept, other = self._read(like)
        return {"source": source, "why": f"{how} {other}: {' '.join(kept[:80].split())}", "text": text[:SNIPPET]}

    def _read(self, document: Place) -> tuple[str, str]:
        number, place = document
        return self.shards[number].document(place)


@dataclass
class SignatureStage(CorpusStage[CorpusShard, list[Any]]):
    """Return the MinHash signature of each document of a shard."""

    options: NearOptions

    def __call__(self, shard: CorpusShard) -> list[Any]:
        return [self._signature(text) for text, _ in shard.documents()]

    def _signature(self, text: str) -> Any:
        bands, rows = banding(self.options)
        signature = require("rensa", "finding near-duplicates").RMinHash(num_perm=bands * rows, seed=_SEED)
        signature.update(shingles(text, self.options))
        return signature


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
    """Return the shingles of a text: `shingle` consecutive units in lower case; of a shorter text, all its units.

    A unit is a run of characters other than whitespace ("words"), or one such character ("characters").
    """
    words = text.lower().split()
    units = words if options.unit == "words" else list("".join(words))
    count = max(1, len(units) - options.shingle + 1)
    return {" ".join(units[k : k + options.shingle]) for k in range(count)}


def jaccard(first: set[str], second: set[str]) -> float:
    """Return |A and B| / |A or B| for two sets that are not empty."""
    common = len(first & second)
    return common / (len(first) + len(second) - common)
