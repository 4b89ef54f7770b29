"""Documents as sets of hashed shingles, with NumPy for a whole batch of documents at once."""

from __future__ import annotations

import numpy as np

from crosstrain.utils.rng import GOLDEN_RATIO, splitmix64

_BASE = np.uint64(0xD6E8FEB86659FD93)  # odd, so that it has an inverse modulo 2^64
_INVERSE = np.uint64(pow(int(_BASE), -1, 1 << 64))
_STEP = 0xA0761D6478BD642F
_VALUES = np.random.default_rng(GOLDEN_RATIO).integers(0, 1 << 64, 256, dtype=np.uint64)  # for each byte
_SPACES = np.isin(np.arange(256), list(b" \t\n\v\f\r"))


def shingles(texts: list[str], length: int, unit: str) -> tuple[np.ndarray, np.ndarray]:
    """Return (uint64 hashes of all shingles, int64 [texts + 1] where each document's begin), with repetitions.

    A shingle is `length` consecutive units in lower case. A unit is a run of characters other than white space
    ("words"), or one such character ("characters"). A document of fewer units is one shingle.
    """
    hashes, owner = _words(texts) if unit == "words" else _characters(texts)
    count = len(hashes)
    sums, weight = np.zeros(count, np.uint64), 1
    for k in range(min(length, count)):
        sums[: count - k] += hashes[k:] * np.uint64(weight)
        weight = (weight * _STEP + 2 * k + 1) % (1 << 64)
    last = np.arange(count) + length - 1
    whole = (last < count) & (owner[np.minimum(last, count - 1)] == owner)
    starts = np.searchsorted(owner, np.arange(len(texts) + 1))
    short = (np.diff(starts) < length) & (np.diff(starts) > 0)
    for document in np.flatnonzero(short):  # one shingle of all its units, in the place of the first
        units = hashes[starts[document] : starts[document + 1]]
        weights = np.arange(1, len(units) + 1, dtype=np.uint64) * np.uint64(_STEP)
        sums[starts[document]] = (units * weights).sum(dtype=np.uint64)
        whole[starts[document]] = True
    offsets = np.searchsorted(owner[whole], np.arange(len(texts) + 1))
    return splitmix64(sums[whole] + np.uint64(GOLDEN_RATIO)), offsets.astype(np.int64)


def jaccard(first: np.ndarray, second: np.ndarray) -> float:
    """Return |A and B| / |A or B| of two sets, each sorted and without repetitions; 1 for two empty sets."""
    common = len(np.intersect1d(first, second, assume_unique=True))
    union = len(first) + len(second) - common
    return common / union if union else 1.0


def _words(texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """Return (hash of each word, number of its document)."""
    parts = [text.lower().encode() for text in texts]
    data = np.frombuffer(b" ".join(parts) + b" ", np.uint8)
    ends = np.cumsum([len(part) + 1 for part in parts])
    inside = np.concatenate(([False], ~_SPACES[data]))
    edges = np.flatnonzero(inside[1:] != inside[:-1])
    begin, end = edges[0::2], edges[1::2]
    # The sum of value * base^position over a word, divided by base^(its position): a polynomial in the base.
    powers = np.full(len(data), _BASE)
    powers[0] = 1
    np.multiply.accumulate(powers, out=powers)
    sums = np.concatenate((np.zeros(1, np.uint64), np.cumsum(_VALUES[data] * powers, dtype=np.uint64)))
    inverse = np.full(len(data), _INVERSE)
    inverse[0] = 1
    np.multiply.accumulate(inverse, out=inverse)
    words = (sums[end] - sums[begin]) * inverse[begin] if len(begin) else np.zeros(0, np.uint64)
    return splitmix64(words + np.uint64(GOLDEN_RATIO)), np.searchsorted(ends, begin, side="right")


def _characters(texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """Return (hash of each character but white space, number of its document)."""
    parts = [np.frombuffer("".join(text.lower().split()).encode("utf-32-le"), np.uint32) for text in texts]
    owner = np.repeat(np.arange(len(texts)), [len(part) for part in parts])
    characters = np.concatenate([*parts, np.zeros(0, np.uint32)]).astype(np.uint64)
    return splitmix64(characters + np.uint64(GOLDEN_RATIO + 1)), owner
