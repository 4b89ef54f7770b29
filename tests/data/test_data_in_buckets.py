"""Data in a bucket: the same samples as from the disk, fetched ahead, within bounds, by the ranges that are needed."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow
import pytest
from crosstrain_plugins.builtin.commands.prepare.options import PrepareOptions
from crosstrain_plugins.builtin.commands.prepare.prepare import prepare
from crosstrain_plugins.builtin.commands.prepare.tools import inspect
from crosstrain_plugins.builtin.datasets import byte_source
from crosstrain_plugins.builtin.datasets.byte_source import RemoteBytes
from crosstrain_plugins.builtin.datasets.prepared import locate_remote
from pyarrow import parquet

from conftest import Workspace, json_lines
from crosstrain.config.batch import BatchPlan
from crosstrain.config.registry import registry
from crosstrain.data.loader import evaluation_batches, training_steps
from crosstrain.data.tokenizer import load_tokenizer
from crosstrain.utils import storage
from crosstrain.utils.errors import DataError
from fixtures_bucket import Bucket, slow
from fixtures_chat import SHAPES, write_tokenizer
from fixtures_ranks import mostly_slow
from fixtures_shards import jpeg, module_of, write_shard

TextDataset = registry.get("dataset", "text")


@pytest.fixture
def memory(home: Path) -> Iterator[str]:
    """An empty bucket in this process's memory."""
    locate_remote.cache_clear()
    store = fsspec.filesystem("memory").store
    store.clear()
    yield "memory://bucket"
    store.clear()


def put(folder: Path, url: str) -> str:
    for path in (path for path in folder.rglob("*") if path.is_file()):
        storage.upload(path, storage.join(url, path.relative_to(folder).as_posix()))
    return url


def opened(path: str, split: str = "train", **options: Any) -> Any:
    return TextDataset(TextDataset.Options(path=path, seq_length=16, split=[80, 10, 10], **options), split)


@pytest.mark.parametrize("options", [{}, {"document_mask": True}])
def test_samples_are_those_of_the_disk(dataset: Path, memory: str, options: dict[str, Any]) -> None:
    url = put(dataset, memory + "/tiny")
    for split in ("train", "val", "test"):
        near, far = opened(str(dataset), split, **options), opened(url, split, **options)
        assert (far.far, near.far) == (True, False)
        assert len(near) == len(far) > 0
        assert (far.vocab_size, far.eod_id) == (near.vocab_size, near.eod_id)
        rng = np.random.default_rng(0)
        for index in range(len(near)):
            theirs = far.get(index, rng)
            assert {key: value.tolist() for key, value in near.get(index, rng).items()} == {
                key: value.tolist() for key, value in theirs.items()
            }
    assert load_tokenizer(far.tokenizer_path).vocab_size == near.vocab_size
    assert opened(url + "/tokens.bin", vocab_file=None).file.num_tokens == near.file.num_tokens
    with pytest.raises(DataError, match="there are no tokens at memory://bucket/nothing: expected a folder"):
        opened(memory + "/nothing")
    with pytest.raises(
        DataError, match=r"memory://bucket/nothing.idx does not exist \(tokens are stored in two files, nothing.b"
    ):
        opened(memory + "/nothing.bin")


@pytest.mark.parametrize("workers", mostly_slow([0, 2], [0]))
def test_batches_of_any_rank_and_start_are_those_of_the_disk(
    dataset: Path, memory: str, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    far, near = opened(put(dataset, memory + "/tiny")), opened(str(dataset))
    plan, fetched = BatchPlan(8, 2, 2, 2), list[int]()
    read_ranges = byte_source.read_ranges

    def counted(url: str, ranges: Any, *more: Any) -> Any:
        fetched.append(len(ranges))
        return read_ranges(url, ranges, *more)

    monkeypatch.setattr(byte_source, "read_ranges", counted)
    for rank in range(2):
        steps = [
            islice(training_steps(data, plan, seed=1, start=40, dp_rank=rank, num_workers=workers), 30)
            for data in (near, far)
        ]
        for one, other in zip(*steps, strict=True):
            assert [m.data["input_ids"].tolist() for m in one] == [m.data["input_ids"].tolist() for m in other]
        passes = [
            evaluation_batches(data, 2, dp_rank=rank, dp_size=2, max_samples=9, num_workers=workers)
            for data in (near, far)
        ]
        for (one, _), (other, _) in zip(*passes, strict=True):
            assert one.data["labels"].tolist() == other.data["labels"].tolist()
    if not workers:  # which count in processes of their own
        batches = 2 * (30 * 2 + 3)
        assert batches <= len(fetched) <= batches + 2 * 9  # those, and what was announced and never asked for
        assert sum(fetched) <= 2 * len(fetched)
        assert len(far.file._bin._announced) <= 2 * 9 * 2


def test_neighbouring_ranges_are_one_request(bucket: Bucket) -> None:
    url = storage.join(bucket.url, "x")
    data = bytes(range(256)) * 1024
    storage.write(url, data)
    ranges = [(200_000, 200_010), (0, 10), (5, 20), (30, 40), (7, 7)]
    bucket.requests.clear()
    assert byte_source.read_ranges(url, ranges, gap=16) == [data[first:last] for first, last in ranges]
    assert bucket.count("GET") == 2


def test_memory_holds_a_bounded_part(memory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    content = np.random.default_rng(0).bytes(1 << 20)
    storage.write(memory + "/object", content)
    monkeypatch.setattr(byte_source, "_HELD", 1000)
    source = RemoteBytes(memory + "/object")
    source.announce([(n, n + 300) for n in range(0, 3000, 300)])
    assert list(source._announced) == [(2100, 2400), (2400, 2700), (2700, 3000)]
    source.announce([(2400, 2700), (5000, 5100), (6000, 6100)])
    assert list(source._announced) == [(2400, 2700), (2700, 3000), (5000, 5100), (6000, 6100)]
    for first, last in [
        (0, 300),
        (2400, 2700),
        (600, 900),
        (5000, 5100),
        (6000, 6100),
        (65_000, 66_000),
        (10, 1 << 20),
    ]:
        assert source.read(first, last) == content[first:last]
    assert list(source._announced) == [(2700, 3000)]
    assert source.read((1 << 20) - 5, (1 << 20) + 5) == content[-5:]
    assert source.read(7, 7) == b""


def test_a_recipe_reads_a_bucket_and_writes_one(memory: str, home: Path) -> None:
    texts = [f"text number {n} has some words" for n in range(40)]
    local = home / "in"
    (local / "more").mkdir(parents=True)
    json_lines(local / "a.jsonl", texts[:20])
    parquet.write_table(pyarrow.table({"text": texts[20:30]}), local / "b.parquet")
    (local / "more" / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts[30:]))
    (local / "more" / "_SUCCESS").write_text("")
    put(local, memory + "/in")
    names = [f"{local}/{name}" for name in ("a.jsonl", "b.parquet", "more/a.jsonl")]
    prepare(PrepareOptions(input=names, train_tokenizer=300), home / "near", False)
    options = PrepareOptions(input=memory + "/in/", train_tokenizer=300)
    summary = prepare(options, memory + "/out", False)
    assert summary.documents == 40
    for name in ("tokens.bin", "tokens.idx", "tokenizer/tokenizer.json"):
        assert storage.read(f"{memory}/out/{name}") == (home / "near" / name).read_bytes()
    with pytest.raises(DataError, match="memory://bucket/out is not empty: overwrite it explicitly"):
        prepare(options, memory + "/out", False)
    assert prepare(options, memory + "/out", False, wait=True) == summary
    assert opened(memory + "/out").file.num_documents == 40
    made = TextDataset.Options(path=memory + "/made", seq_length=16, prepare=options)
    assert not TextDataset.is_prepared(made)
    TextDataset.prepare(made)
    assert TextDataset.is_prepared(made)
    assert storage.read(memory + "/made/tokens.bin") == storage.read(memory + "/out/tokens.bin")
    assert "40 documents" in inspect(memory + "/out")
    with pytest.raises(DataError, match="memory://bucket/none/ holds no file that a reader supports"):
        prepare(PrepareOptions(input=memory + "/none/", train_tokenizer=300), home / "x", False)


def test_conversations_come_from_a_bucket(memory: str, home: Path) -> None:
    tokenizer = write_tokenizer(home / "tokenizer", SHAPES["chatml"].template)
    Chat = registry.get("dataset", "chat")

    def given(path: str) -> list[list[int]]:
        data = Chat(Chat.Options(path=path, tokenizer=str(tokenizer), seq_length=512), "train")
        assert data.location(0).startswith(path.removeprefix("memory://"))
        assert not (data.folder / "copies").exists()
        return [data.get(n, np.random.default_rng(0))["input_ids"].tolist() for n in range(len(data))]

    for name, words in (("a.jsonl", "hello"), ("more/b.json", "the cat")):
        (file := home / "chats" / name).parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps({"prompt": words, "completion": f"{words} sat"}))
    put(home / "chats", memory + "/chats")
    assert given(memory + "/chats") == given(str(home / "chats"))
    assert given(memory + "/chats/a.jsonl") == given(str(home / "chats" / "a.jsonl"))
    storage.write(memory + "/chats/a.jsonl", json.dumps({"prompt": "on", "completion": "the mat"}).encode())
    storage.remove(memory + "/chats/more")
    assert len(given(memory + "/chats")) == 1
    assert given(memory + "/chats") == given(memory + "/chats/a.jsonl") != given(str(home / "chats" / "a.jsonl"))
    with pytest.raises(DataError, match=r"the input memory://bucket/none.jsonl does not exist"):
        given(memory + "/none.jsonl")


def test_shards_come_from_a_bucket(memory: str, home: Path) -> None:
    shards = module_of("image_text", "webdataset")
    samples = [{"jpg": jpeg(n), "txt": b"red circle"} for n in range(5)]
    write_shard(home / "a.tar", samples)
    storage.upload(home / "a.tar", memory + "/a.tar")
    names = shards.expand([memory + "/a.tar"])
    shards.prepare(names, home / "cache")
    assert shards.Shards(names, home / "cache").read(3)[1] == samples[3]


# ---- a run against a server


@pytest.mark.slow
@pytest.mark.timeout(900)  # both take 450 s one after the other at a load of 10 on two cores
@pytest.mark.parametrize("workers", mostly_slow([0, 2], [0]))
def test_a_run_from_a_bucket_has_the_losses_of_a_local_one(
    workspace: Workspace, dataset: Path, bucket: Bucket, workers: int
) -> None:
    put(dataset, f"{bucket.url}/tiny")
    far = (f"datasets.tiny.path={bucket.url}/tiny", f"run.num_workers={workers}", "run.eval_interval=10")
    env = bucket.environment | {"XDG_CACHE_HOME": str(workspace.path / "cache"), "NO_PROXY": "127.0.0.1"}
    near = workspace.train("near", "run.eval_interval=10", nproc=2)
    first = workspace.train("far", *far, "run.max_iters=10", "run.lr_decay_iters=20", nproc=2, env=env)
    resumed = workspace.train("far", *far, "run.lr_decay_iters=20", nproc=2, env=env)
    assert first.code == resumed.code == 0
    assert resumed.column("loss") == near.column("loss")
    assert [row.get("val_loss") for row in resumed.rows if "val_loss" in row] == [
        row.get("val_loss") for row in near.rows if "val_loss" in row
    ]


@pytest.mark.slow
def test_latency_does_not_slow_the_steps(workspace: Workspace, dataset: Path, bucket: Bucket) -> None:
    put(dataset, f"{bucket.url}/tiny")
    shape = ("model.n_layer=8", "model.n_embd=256", "run.max_iters=60", "run.eval_interval=null", "model.n_head=4")
    env = bucket.environment | {"XDG_CACHE_HOME": str(workspace.path / "cache"), "NO_PROXY": "127.0.0.1"}
    near = workspace.train("near", *shape)
    with bucket.interfered(slow(0.02)):
        far = workspace.train("far", *shape, f"datasets.tiny.path={bucket.url}/tiny", env=env)
    assert far.column("loss") == near.column("loss")
    step, other = (statistics.median(run.column("step_ms")[5:]) for run in (near, far))
    waits = [statistics.median(t["data loader"] for t in run.column("timers")[5:]) for run in (near, far)]
    print(f"steps of {step:.0f} ms, {waits[0]:.1f} for data; from the bucket {other:.0f} and {waits[1]:.1f} ms")
    # The part of a step that waits for data: the rest varies with what else the machine does, the server's work among
    # it. A step makes two requests: without read-ahead it would wait 40 ms longer.
    assert waits[1] - waits[0] < 0.05 * step
