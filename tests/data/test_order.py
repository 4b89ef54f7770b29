"""The computed shuffle: a bijection, different per key, fair, and flat in cost."""

from __future__ import annotations

import itertools
import time
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crosstrain.data.shuffle import MAX_SIZE, Permutation, sample_index

keys = st.integers(0, 2**64 - 1)
sizes = st.one_of(st.integers(1, 2000), st.integers(1, 2**48), st.integers(1, MAX_SIZE))


def images(n: int, key: int, places: int | None = None) -> np.ndarray:
    """The first images of a permutation, by default all."""
    return np.array([*map(Permutation(n, key), range(n if places is None else places))])


def test_every_small_size_is_a_bijection() -> None:
    for n in range(1, 400):
        assert sorted(images(n, key=n)) == list(range(n))


@settings(deadline=None)
@given(st.integers(1, 3000), keys)
def test_is_a_bijection_for_any_key(n: int, key: int) -> None:
    assert np.array_equal(np.sort(images(n, key)), np.arange(n))


@settings(deadline=None)
@given(sizes, keys, st.data())
def test_the_images_of_a_large_range_lie_in_it_and_differ(n: int, key: int, data: st.DataObject) -> None:
    indices = data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=20))
    permutation = Permutation(n, key)
    images = [permutation(i) for i in indices]
    assert all(0 <= i < n for i in images)
    assert len(set(images)) == len(set(indices))


def test_values_are_fixed_for_ever() -> None:
    """A change here silently reorders everybody's data on resume."""
    assert images(1000, 42, places=5).tolist() == [757, 29, 410, 765, 502]
    two_epochs = "".join(str(sample_index(1234, n, 10)) for n in range(20))
    assert two_epochs == "8756391240" + "4059613782"


def test_keys_give_unrelated_orders() -> None:
    n = 10_000
    orders = [images(n, key) for key in range(20)] + [np.arange(n)]
    # Two independent permutations agree in about one place (Poisson with mean 1): more than 12 has probability 1e-10.
    for x, y in itertools.combinations(orders, 2):
        assert (x == y).sum() <= 12


def test_neighbours_do_not_stay_neighbours() -> None:
    n = 100_000
    shuffled = images(n, 3)
    steps = np.diff(shuffled)
    # Each step is +-1 with probability 2/n; the correlation of successive values is about normal(0, 1/sqrt n).
    assert (np.abs(steps) == 1).sum() <= 15
    assert abs(np.corrcoef(shuffled[:-1], shuffled[1:])[0, 1]) < 6 / np.sqrt(n)


def chi_square_bound(degrees: int) -> float:
    """A value that a chi-square variable with so many degrees of freedom exceeds with probability below 1e-9.

    P(X >= d + 2 sqrt(d t) + 2 t) <= exp(-t): Laurent & Massart, Annals of Statistics 2000, Lemma 1.
    """
    t = np.log(1e9)
    return degrees + 2 * np.sqrt(degrees * t) + 2 * t


@pytest.mark.parametrize("n", [2, 3, 7, 16, pytest.param(50, marks=pytest.mark.slow)])
def test_every_sample_is_equally_likely_at_every_place(n: int) -> None:
    trials = 100 * n
    orders = np.stack([images(n, key) for key in range(trials)])
    for place in range(n):
        counts = np.bincount(orders[:, place], minlength=n)
        assert ((counts - 100) ** 2 / 100).sum() < chi_square_bound(n - 1)


def test_all_orders_of_four_are_equally_likely() -> None:
    trials = 9600
    seen = [tuple(images(4, key).tolist()) for key in range(trials)]
    counts = np.array([seen.count(order) for order in itertools.permutations(range(4))])
    assert ((counts - 400) ** 2 / 400).sum() < chi_square_bound(23)


def test_every_epoch_visits_every_sample_once_in_a_new_order() -> None:
    length = 97
    epochs = [[sample_index(7, e * length + i, length) for i in range(length)] for e in range(5)]
    assert all(sorted(epoch) == list(range(length)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 5
    assert epochs[0] != [sample_index(8, i, length) for i in range(length)]


def test_jumping_to_a_sample_gives_what_walking_to_it_gives() -> None:
    walked = [sample_index(1, n, 10) for n in range(1000)]
    assert [sample_index(1, n, 10) for n in reversed(range(1000))] == walked[::-1]


def test_a_huge_dataset_costs_no_more_than_a_small_one() -> None:
    def seconds(n: int) -> float:
        times = []
        for _ in range(5):
            start = time.perf_counter()
            for i in range(200):
                Permutation(n, i)(i)
            times.append(time.perf_counter() - start)
        return min(times)

    assert seconds(10**12) < 5 * seconds(10**3)
    tracemalloc.start()
    Permutation(10**12, 1)(123_456_789_012)
    assert tracemalloc.get_traced_memory()[1] < 50_000
    tracemalloc.stop()


def test_what_is_outside_the_range_is_refused() -> None:
    for n in (0, -1, MAX_SIZE + 1):
        with pytest.raises(ValueError, match="between 1 and"):
            Permutation(n, 0)
    for i in (-1, 10):
        with pytest.raises(IndexError):
            Permutation(10, 0)(i)
