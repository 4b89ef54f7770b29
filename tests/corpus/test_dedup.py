"""Repeated documents: how many of those planted are found, and nothing else."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from crosstrain_plugins.builtin.commands.prepare import dedup
from crosstrain_plugins.builtin.commands.prepare.dedup import find_duplicates, jaccard, shingles
from crosstrain_plugins.builtin.commands.prepare.options import DedupOptions, NearOptions
from crosstrain_plugins.builtin.commands.prepare.shards import CorpusShard
from hypothesis import given, settings
from hypothesis import strategies as st

from fixtures_corpus import write_shard

WORDS = [f"{a}{b}" for a in "bcdfghjklm" for b in ("an", "er", "is", "ot", "ul", "ay", "ee", "on", "im", "up")]
SHARD = 100  # documents


def write_shards(folder: Path, texts: list[str]) -> list[CorpusShard]:
    return [
        write_shard(
            folder, f"s{start}", [(text, f"t:{start + i}") for i, text in enumerate(texts[start : start + SHARD])]
        )
        for start in range(0, len(texts), SHARD)
    ]


def search(folder: Path, texts: list[str], options: DedupOptions) -> tuple[list[int], dict[str, Any]]:
    """Numbers of the documents that go."""
    dropped, report = find_duplicates(options, write_shards(folder / "texts", texts), 1, lambda count: None)
    return [number * SHARD + place for number, places in enumerate(dropped) for place in places], report


def true_sets(texts: list[str], length: int = 5) -> list[set[tuple[str, ...]]]:
    words = [text.lower().split() for text in texts]
    return [set(zip(*(w[k:] for k in range(length)), strict=False)) or {tuple(w)} for w in words]


@settings(deadline=None)
@given(st.text("aB \n\té東", min_size=1, max_size=12), st.integers(1, 4), st.sampled_from(["words", "characters"]))
def test_shingles_are_successive_units(text: str, length: int, unit: str) -> None:
    spaced = "".join(f" {c} " if unit == "characters" else c for c in text.lower())
    parts = spaced.split()
    whole = {tuple(parts[k : k + length]) for k in range(len(parts) - length + 1)} or {tuple(parts)}
    assert {tuple(found.split()) for found in shingles(text, NearOptions(shingle=length, unit=unit))} == whole  # type: ignore[arg-type]


def test_equal_documents_leave_the_first(tmp_path: Path) -> None:
    texts = ["a b c", "d", "a b c", "d ", "d", *(str(i) for i in range(300)), "a b c"]
    gone, found = search(tmp_path, texts, DedupOptions())
    assert gone == [2, 4, 305]
    assert found["exact"]["documents"] == 3
    assert found["exact"]["examples"][0]["why"] == "equal to t:0: a b c"
    assert {example["source"] for example in found["exact"]["examples"]} == {"t:2", "t:4", "t:305"}


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
    assert found["near"]["documents"] == len(gone)


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
        bands, rows = dedup.banding(NearOptions(threshold=threshold))
        assert bands * rows <= 128
        assert 1 - (1 - threshold**rows) ** bands >= 0.99
    assert dedup.banding(NearOptions(threshold=0.8)) == (21, 6)


def test_jaccard_is_that_of_sets() -> None:
    assert jaccard({"1", "2", "3", "5"}, {"2", "3", "4"}) == 2 / 5
    assert jaccard({"1"}, {"1"}) == 1.0
