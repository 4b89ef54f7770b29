"""Random numbers as functions of what they are for, not of what ran before.

Nothing here keeps state, so there is nothing to save and a resumed run draws what the uninterrupted one would have.
"""

from __future__ import annotations

import hashlib

import numpy as np
import torch


def derive_seed(*parts: int | str) -> int:
    """A 63-bit seed that depends on every part: `derive_seed(seed, "dropout", first_sample)`."""
    text = "\x1f".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


def generator(*parts: int | str) -> torch.Generator:
    """A CPU generator seeded with `derive_seed(*parts)`; CPU so that values do not depend on the device."""
    return torch.Generator().manual_seed(derive_seed(*parts))


def sample_rng(seed: int, number: int) -> np.random.Generator:
    """The generator that sample `number` may use for augmentation."""
    return np.random.default_rng(derive_seed(seed, "sample", number))


def seed_everything_for(seed: int, first_sample: int) -> None:
    """Seed torch's default generators (dropout) for the micro-batch that begins with sample `first_sample`."""
    torch.manual_seed(derive_seed(seed, "micro batch", first_sample))
