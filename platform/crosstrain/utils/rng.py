"""Stateless random numbers: the seed of every generator is derived from its purpose.

A checkpoint stores no RNG state, yet a resumed run draws the same numbers as an uninterrupted run.
"""

import hashlib
from typing import TYPE_CHECKING, TypeVar

import numpy as np

if TYPE_CHECKING:  # torch is imported in functions, because processes that prepare a corpus do not need it
    import torch

T = TypeVar("T", int, np.ndarray)

GOLDEN_RATIO = 0x9E3779B97F4A7C15  # splitmix64's increment, 2^64 / 1.618...


def splitmix64(z: T) -> T:
    """Mix the bits of an int or of a uint64 array, with the finalizer of splitmix64 (Steele, Lea & Flood, 2014)."""
    mask = 2**64 - 1
    z = z & mask
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        z = ((z ^ (z >> shift)) * factor) & mask
    return z ^ (z >> 31)


def derive_seed(*parts: int | str) -> int:
    """Return a 63-bit seed that depends on every part: `derive_seed(seed, "dropout", first_sample)`."""
    text = "\x1f".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


def generator(*parts: int | str) -> "torch.Generator":
    """Return a generator seeded with `derive_seed(*parts)`, on the CPU, so that values do not depend on the device."""
    import torch

    return torch.Generator().manual_seed(derive_seed(*parts))


def sample_rng(seed: int, number: int) -> np.random.Generator:
    """Return the generator for the augmentation of sample `number`."""
    return np.random.default_rng(derive_seed(seed, "sample", number))
