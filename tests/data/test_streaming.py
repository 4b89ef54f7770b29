"""Shards that are read as they come: what every reader sees, and what becomes of those that cannot be read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from crosstrain.config.batch import BatchPlan
from crosstrain.config.load import load_config
from crosstrain.data.dataset import ReadContext
from crosstrain.data.loader import training_steps
from crosstrain.utils.errors import ConfigError, DataError
from fixtures_shards import captions, jpeg, module_of, opened, serving, write_shard
from fixtures_vision import write_project


@pytest.fixture
def served(home: Path) -> Iterator[str]:
    write_shards(home / "www")
    with serving(home / "www") as address:
        yield address


def write_shards(folder: Path, count: int = 4, each: int = 5) -> str:
    for shard in range(count):
        samples = [{"jpg": jpeg(each * shard + i), "txt": b"red circle"} for i in range(each)]
        write_shard(folder / f"train-{shard:03d}.tar", samples, each * shard)
    return f"{folder}/train-{{000..{count - 1:03d}}}.tar"


def streamed(words: Path, train: str | list[str], **more: Any) -> dict[str, Any]:
    return captions(words, train=train, streaming=True, **{"samples": 20, "shuffle_buffer": 6, **more})


def stream(names: list[str], reading: ReadContext, worker: int = 0, workers: int = 1, max_lost: float = 0.0) -> Any:
    return module_of("image_text", "streaming").ShardStream(names, reading, worker, workers, 6, max_lost)


def keys(source: Any, count: int) -> list[str]:
    return [name.rpartition(": ")[2] for name, _ in islice(iter(source), count)]


def test_readers_share_a_pass_and_each_goes_on_with_another(home: Path) -> None:
    names = module_of("image_text", "webdataset").expand(write_shards(home))
    everything = {f"{i:06d}" for i in range(20)}
    for number in range(3):
        seen: Counter[str] = Counter()
        for rank in range(2):
            for worker in range(2):
                reader = stream(names, ReadContext(7, 0, rank, 2), worker, 2)
                seen.update(keys(reader, 5 * (number + 1))[-5:])
        assert seen.keys() == everything
        assert set(seen.values()) == {1}


def test_the_order_is_one_of_the_seed_and_the_first_sample(home: Path) -> None:
    names = module_of("image_text", "webdataset").expand(write_shards(home))
    one, same, resumed, other = (
        keys(stream(names, ReadContext(seed, start, 0, 1)), 40) for seed, start in ((7, 0), (7, 0), (7, 12), (8, 0))
    )
    assert one == same
    assert sorted(one[:20]) == sorted(one[20:]) == sorted(set(resumed[:20]))
    assert len({tuple(order[:20]) for order in (one, resumed, other)} | {tuple(one[20:])}) == 4
    assert any(a[:-1] != b[:-1] for a, b in zip(sorted(one[:6]), one[:6], strict=True)), "shards are mixed"


@pytest.mark.parametrize("workers", [0, 2])
def test_training_reads_streams_without_index_or_copy(home: Path, words: Path, served: str, workers: int) -> None:
    sources = [f"{served}/train-{{000..002}}.tar", f"pipe:cat {home}/www/train-003.tar"]
    dataset = opened(home, streamed(words, sources))
    assert len(dataset) == 20
    steps = training_steps(dataset, BatchPlan(1, 1, 1, 1), seed=3, start=0, dp_rank=0, num_workers=workers)
    seen = Counter(round(next(steps)[0].data["pixel_values"].sum().item(), 3) for _ in range(40))
    assert len(seen) == 20
    assert max(seen.values()) < 5  # readers with two shards of ten samples; others go round more often
    assert not list((home / "cache").rglob("*.tar"))
    assert not list((home / "cache").rglob("*.index"))


def test_the_other_splits_keep_their_order(home: Path, words: Path) -> None:
    train = write_shards(home)
    dataset = opened(home, streamed(words, train, val=f"{home}/train-000.tar"), split="val")
    assert [dataset.samples.read(i)[0] for i in (0, 4)] == ["train-000.tar: 000000", "train-000.tar: 000004"]


def test_bad_samples_of_a_stream_are_counted_up_to_their_share(home: Path, words: Path) -> None:
    image = jpeg(0)
    bad = [{"jpg": image[:99], "txt": b"red"}, {"txt": b"red"}, {"jpg": image}]
    good = [{"jpg": jpeg(i), "txt": b"red circle"} for i in range(5)]
    path = str(write_shard(home / "a.tar", [*good, *bad]))

    def steps(share: float) -> Any:
        dataset = opened(home, streamed(words, path, max_skipped=share))
        return dataset, training_steps(dataset, BatchPlan(1, 1, 1, 1), seed=0, start=0, dp_rank=0)

    dataset, batches = steps(0.5)
    taken = [next(batches) for _ in range(10)]
    assert len({round(batch[0].data["pixel_values"].sum().item(), 3) for batch in taken}) == 5
    for part in ("not a readable image", "no image", "neither a .json"):
        assert any(part in reason for reason in dataset.skipped.values())
    _, batches = steps(0.1)
    with pytest.raises(DataError, match=r"3 of 20 samples cannot be used, .* share max_skipped=0\.1"):
        list(islice(batches, 10))


@pytest.mark.parametrize("harm", ["truncated", "absent", "failing", "no tar"])
def test_a_shard_that_cannot_be_read_to_its_end(home: Path, harm: str) -> None:
    names = module_of("image_text", "webdataset").expand(write_shards(home))
    whole = (home / "train-002.tar").read_bytes()
    if harm == "failing":
        names[2] = f"pipe:cat {names[2]}; exit 3"  # all of it came, as far as anyone can tell
    elif harm == "absent":
        names[2] = f"{home}/none.tar"
    else:
        (home / "train-002.tar").write_bytes(whole[: len(whole) // 2] if harm == "truncated" else b"no tar" * 999)
    with pytest.raises(DataError, match=r"cannot be read to its end \(.*\), which is one of 1 shards among 4"):
        keys(stream(names, ReadContext(0, 0, 0, 1)), 40)
    patient = stream(names, ReadContext(0, 0, 0, 1), max_lost=0.25)
    seen = set(keys(patient, 200))
    assert list(patient.lost) == [names[2]]
    assert {f"{i:06d}" for i in range(20) if not 10 <= i < 15} <= seen
    if harm == "truncated":
        assert "000010" in seen
        assert "000014" not in seen


def test_what_cannot_be_streamed_is_one_sentence(home: Path, words: Path) -> None:
    train = write_shards(home, 2)
    with pytest.raises(ConfigError, match="say with streaming how many samples are an epoch"):
        load_config(write_project(home / "project.yaml", streamed(words, train, samples=None)))
    dataset = opened(home, streamed(words, train))
    plan = BatchPlan(4, 1, 1, 4)
    with pytest.raises(DataError, match="2 shards cannot be streamed by 4 readers"):
        next(training_steps(dataset, plan, seed=0, start=0, dp_rank=3))
    with pytest.raises(DataError, match="is streamed and has no sample 3: set streaming=false"):
        dataset.examples(3)
    with pytest.raises(DataError, match="cannot be opened"):
        opened(home, streamed(words, f"{home}/other-{{0..1}}.tar"))
    write_shard(home / "empty.tar", [])
    with pytest.raises(DataError, match="no sample could be read"):
        keys(stream([f"{home}/empty.tar"], ReadContext(0, 0, 0, 1)), 1)
