"""Repeated documents: how many of those planted are found, and that memory does not grow with the corpus."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
from crosstrain_plugins.builtin.commands.prepare import dedup, minhash
from crosstrain_plugins.builtin.commands.prepare.dedup import Duplicates, ExternalSort, find_duplicates
from crosstrain_plugins.builtin.commands.prepare.minhash import jaccard, shingles
from crosstrain_plugins.builtin.commands.prepare.options import DedupOptions, NearOptions
from crosstrain_plugins.builtin.commands.prepare.pool import WorkerPool
from crosstrain_plugins.builtin.commands.prepare.shards import CorpusShard
from hypothesis import given, settings
from hypothesis import strategies as st

from conftest import ENVIRONMENT, ROOT

WORDS = [f"{a}{b}" for a in "bcdfghjklm" for b in ("an", "er", "is", "ot", "ul", "ay", "ee", "on", "im", "up")]


def write_shards(folder: Path, texts: list[str], size: int = 100) -> list[CorpusShard]:
    folder.mkdir(parents=True, exist_ok=True)
    shards = [CorpusShard(folder, f"s{k}") for k in range(0, len(texts), size)]
    for k, shard in enumerate(shards):
        part = texts[k * size : (k + 1) * size]
        shard.write(((text.encode(), f"t:{k * size + i}") for i, text in enumerate(part)), {"counts": {}})
    return shards


def search(folder: Path, texts: list[str], options: DedupOptions) -> tuple[list[int], Duplicates]:
    """Numbers of the documents that go."""
    shards = write_shards(folder / "texts", texts)
    with WorkerPool(1) as pool:
        found = find_duplicates(options, shards, folder, pool, lambda count: None)
    marks = found.marks if found.marks is not None else np.zeros(0)
    return np.flatnonzero(marks).tolist(), found


def true_sets(texts: list[str], length: int = 5) -> list[set[tuple[str, ...]]]:
    words = [text.lower().split() for text in texts]
    return [set(zip(*(w[k:] for k in range(length)), strict=False)) or {tuple(w)} for w in words]


@settings(deadline=None)
@given(
    st.lists(st.text("aB \n\té東", max_size=12), max_size=5),
    st.integers(1, 4),
    st.sampled_from(["words", "characters"]),
)
def test_shingles_are_those_of_plain_python(texts: list[str], length: int, unit: str) -> None:
    """Equal shingles have equal hashes, different ones different hashes, within a document and between them."""
    hashes, offsets = shingles(texts, length, unit)
    expected = []
    for text in texts:
        spaced = "".join(f" {c} " if unit == "characters" else c for c in text.lower())
        parts = spaced.split()
        whole = [tuple(parts[k : k + length]) for k in range(len(parts) - length + 1)]
        expected.append(whole or ([tuple(parts)] if parts else []))
    assert np.diff(offsets).tolist() == [len(found) for found in expected]
    names = [(len(name) < length, name) for found in expected for name in found]
    assert len(set(hashes.tolist())) == len(set(names))
    assert len(set(zip(names, hashes.tolist(), strict=True))) == len(set(names))


def test_equal_documents_leave_the_first(tmp_path: Path) -> None:
    texts = ["a b c", "d", "a b c", "d ", "d", *(str(i) for i in range(300)), "a b c"]
    gone, found = search(tmp_path, texts, DedupOptions())
    assert gone == [2, 4, 305]
    assert found.report["exact"]["documents"] == 3
    assert found.report["exact"]["examples"][0]["why"] == "equal to t:0: a b c"
    assert {example["source"] for example in found.report["exact"]["examples"]} == {"t:2", "t:4", "t:305"}


def planted(count: int, seed: int = 0) -> tuple[list[str], list[tuple[int, int, float]]]:
    """Documents, and (original, copy, share of words replaced) of the copies among them."""
    rng = random.Random(seed)
    texts = [" ".join(rng.choices(WORDS, k=rng.randint(60, 400))) for _ in range(count)]
    copies = []
    for original in range(0, count, 4):
        words, share = texts[original].split(), rng.choice([0.005, 0.01, 0.02, 0.04, 0.08])
        for place in rng.sample(range(len(words)), max(1, int(share * len(words)))):
            words[place] = rng.choice(WORDS)
        copies.append((original, len(texts), share))
        texts.append(" ".join(words))
    return texts, copies


def test_planted_near_duplicates_are_found_and_nothing_else(tmp_path: Path) -> None:
    """Whether a pair is one at the threshold is decided by its true similarity, so precision is 1 by construction."""
    texts, copies = planted(600)
    sets = true_sets(texts)
    similarity = {copy: len(sets[a] & sets[copy]) / len(sets[a] | sets[copy]) for a, copy, _ in copies}
    wanted = {copy for copy, s in similarity.items() if s >= 0.8}
    assert 40 < len(wanted) < len(copies)
    gone, found = search(tmp_path, texts, DedupOptions(near=NearOptions()))
    assert not set(gone) - wanted
    assert len(wanted & set(gone)) >= 0.97 * len(wanted)  # expected: above 0.99 (`banding`); three may be unlucky
    assert found.report["near"]["documents"] == len(gone)


def test_of_a_chain_the_ones_unlike_what_stays_stay(tmp_path: Path) -> None:
    """0 is like 1 and 1 is like 2, but 0 is not like 2: what is like a document that goes may stay."""
    words = random.Random(1).choices(WORDS, k=300)
    chain = [words[k * 12 : k * 12 + 220] for k in range(3)]
    texts = [" ".join(part) for part in chain]
    sets = true_sets(texts)
    first = len(sets[0] & sets[1]) / len(sets[0] | sets[1])
    second = len(sets[0] & sets[2]) / len(sets[0] | sets[2])
    assert second < 0.85 < first
    gone, _ = search(tmp_path, texts, DedupOptions(near=NearOptions(threshold=0.85)))
    assert gone == [1]


def test_bands_find_the_pairs_at_the_threshold() -> None:
    for threshold in (0.5, 0.7, 0.8, 0.9, 1.0):
        bands, rows = minhash.banding(NearOptions(threshold=threshold))
        assert bands * rows <= 128
        assert 1 - (1 - threshold**rows) ** bands >= 0.99
    assert minhash.banding(NearOptions(threshold=0.8)) == (21, 6)


def test_jaccard_is_that_of_sets() -> None:
    a, b = np.array([1, 2, 3, 5], np.uint64), np.array([2, 3, 4], np.uint64)
    assert jaccard(a, b) == 2 / 5
    assert jaccard(a, a) == 1.0
    assert jaccard(a[:0], b[:0]) == 1.0


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 9)), max_size=60), st.integers(16, 200))
def test_buckets_sort_whatever_does_not_fit_into_memory(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[int, int]], memory: int
) -> None:
    with (
        patch.object(dedup, "SORTED_BYTES", memory),
        ExternalSort(tmp_path_factory.mktemp("b") / "buckets", 2, len(rows)) as buckets,
    ):
        for start in range(0, len(rows), 7):
            part = rows[start : start + 7]
            buckets.add(np.array([k for k, _ in part], np.uint64), np.array([v for _, v in part], np.uint64))
        found = [tuple(map(int, row)) for chunk in buckets.sorted() for row in chunk]
        assert found == sorted(rows)
    assert not buckets.folder.exists()


_MEASURED = """
import resource, sys
from pathlib import Path
sys.path[:0] = sys.argv[3:]
from test_dedup import search, planted
from crosstrain_plugins.builtin.commands.prepare import dedup
from crosstrain_plugins.builtin.commands.prepare.options import DedupOptions, NearOptions
dedup.SORTED_BYTES = 1 << 20
texts, _ = planted(40)
search(Path(sys.argv[1]) / "warm", texts, DedupOptions(near=NearOptions()))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
from test_dedup import write_many
from crosstrain_plugins.builtin.commands.prepare.dedup import find_duplicates
from crosstrain_plugins.builtin.commands.prepare.pool import WorkerPool
shards = write_many(Path(sys.argv[1]) / "texts", int(sys.argv[2]))
with WorkerPool(1) as pool:
    find_duplicates(DedupOptions(near=NearOptions()), shards, Path(sys.argv[1]), pool, lambda count: None)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def write_many(folder: Path, count: int) -> list[CorpusShard]:
    """Shards of `count` thousand documents, a tenth of them near-duplicates, never all in memory."""
    shards = []
    for k in range(count):
        texts, _ = planted(800, seed=k)
        shards += [CorpusShard(part.folder, part.key) for part in write_shards(folder / "all", texts, len(texts))]
        last = shards[-1]
        for ending in ("text", "npy", "sources", "json"):
            last.path(ending).rename(last.folder / f"p{k}.{ending}")
        shards[-1] = CorpusShard(last.folder, f"p{k}")
    return shards


@pytest.mark.slow
def test_memory_does_not_grow_with_the_corpus(tmp_path: Path) -> None:
    def growth(count: int) -> int:
        folder = tmp_path / str(count)
        folder.mkdir()
        done = subprocess.run(
            [sys.executable, "-c", _MEASURED, str(folder), str(count), str(ROOT / "tests"), str(Path(__file__).parent)],
            env=ENVIRONMENT | {"PYTHONPATH": str(ROOT / "platform")},
            capture_output=True,
            text=True,
            check=True,
        )
        return int(done.stdout)

    small, large = growth(4), growth(40)
    # In KiB. Ten times the documents; what may grow is the allocator's arenas and a byte per document.
    assert large < small + 48 * 1024, (small, large)
