"""The order of samples: a shuffle that is computed, not stored.

The shuffle is a keyed bijection of range(n); computing one value takes constant time. An epoch of 10**12 samples is
shuffled without an index file, memory for the order, or start-up time. The algorithm is the generalized Feistel network
on Z_a x Z_b with cycle walking of Black & Rogaway, "Ciphers with Arbitrary Finite Domains" (CT-RSA 2002), with
splitmix64's finalizer (Steele, Lea & Flood, OOPSLA 2014) as the round function. The shuffle is not cryptographically
secure.
"""

import math
from functools import lru_cache

from crosstrain.utils.rng import GOLDEN_RATIO, derive_seed, splitmix64

MAX_SIZE = 2**62  # so that every intermediate value, at most a * b + a, fits into 64 bits

# Four rounds make the order of many samples look random. Twelve rounds make even the 5! orders of five samples about
# equally likely. The number of rounds must be even, because each round swaps the two halves of the value.
_ROUNDS = 12


class Permutation:
    """A bijection of range(n) that looks random and depends on `key`: `Permutation(n, key)(i)`.

    n: from 1 to 2**62; other values raise ValueError. key: any int; only its low 64 bits are used.
    """

    def __init__(self, n: int, key: int) -> None:
        if not 1 <= n <= MAX_SIZE:
            raise ValueError(f"a permutation needs between 1 and 2**62 elements, not {n}")
        self.n = n
        # a * b exceeds n by less than a, about sqrt(n), so cycle walking takes barely more than one pass on average.
        self._a = math.isqrt(n - 1) + 1
        self._b = -(-n // self._a)
        self._keys = [splitmix64(splitmix64(key) + r * GOLDEN_RATIO) for r in range(1, _ROUNDS + 1)]

    def __call__(self, i: int) -> int:
        """Return the image of `i`. Raises IndexError unless 0 <= i < n."""
        if not 0 <= i < self.n:
            raise IndexError(f"{i} is outside range({self.n})")
        i = self._scramble(i)
        while i >= self.n:  # the network permutes a * b >= n values: repeat until the value is in range(n)
            i = self._scramble(i)
        return i

    def _scramble(self, i: int) -> int:
        """Pass a number below a * b through the network once."""
        right, left = divmod(i, self._a)  # left in Z_a, right in Z_b
        for r, key in enumerate(self._keys):
            modulus = self._b if r % 2 else self._a
            left, right = right, (left + splitmix64(right + key) % modulus) % modulus
        return left + right * self._a


def sample_index(seed: int, n: int, length: int) -> int:
    """Return the index of a run's sample `n` in a dataset of `length` samples, from a new shuffle every epoch."""
    epoch, position = divmod(n, length)
    return _epoch(seed, epoch, length)(position)


@lru_cache(maxsize=64)  # a mixture has a permutation for each part
def _epoch(seed: int, epoch: int, length: int) -> Permutation:
    return Permutation(length, derive_seed(seed, "epoch", epoch))
