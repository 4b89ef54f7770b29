"""Samples of the `text` dataset: cut without gaps, split by documents as Megatron does, from either kind of files."""

from __future__ import annotations

import json
import pickle
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from crosstrain_plugins.builtin.commands.prepare.options import PrepareOptions
from crosstrain_plugins.builtin.commands.prepare.train_bpe import train_bpe
from crosstrain_plugins.builtin.datasets.indexed_dataset import TokenWriter
from hypothesis import example, given, settings
from hypothesis import strategies as st

from crosstrain.config.registry import registry
from crosstrain.config.schema import Checker
from crosstrain.data.tokenizer import load_tokenizer
from crosstrain.utils.errors import ConfigError, DataError

TextDataset = registry.get("dataset", "text")
split_bounds = sys.modules[TextDataset.__module__].split_bounds
RNG = np.random.default_rng(0)


def megatron(prefix: Path, documents: list[list[int]]) -> Path:
    with TokenWriter(prefix, "uint16") as writer:
        writer.add(documents)
    return prefix


def dataset(path: Path, which: str = "train", **options: Any) -> Any:
    return TextDataset(TextDataset.Options(path=str(path), **options), which)


def prepared(tmp_path: Path, texts: list[str], **more: Any) -> tuple[PrepareOptions, Path]:
    source = tmp_path / "source.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return PrepareOptions(input=str(source), train_tokenizer=300, **more), tmp_path / "prepared"


# ---- samples


@settings(deadline=None)
@given(st.lists(st.integers(0, 30), min_size=1, max_size=6), st.integers(1, 12))
def test_samples_follow_each_other_without_gap_or_overlap(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], length: int
) -> None:
    total = sum(sizes)
    documents = np.split(np.arange(total), np.cumsum(sizes)[:-1])
    prefix = megatron(tmp_path_factory.mktemp("d") / "t", [document.tolist() for document in documents])
    expected = (total - 1) // length if total else 0
    if expected == 0:
        with pytest.raises(DataError, match="the train split"):
            dataset(prefix, seq_length=length, split=[1])
        return
    data = dataset(prefix, seq_length=length, split=[1])
    samples = [data.get(i, RNG) for i in range(len(data))]
    assert len(data) == expected
    assert np.concatenate([sample["input_ids"] for sample in samples]).tolist() == list(range(expected * length))
    assert all((sample["labels"] == sample["input_ids"] + 1).all() for sample in samples)
    assert {sample[key].dtype for sample in samples for key in sample} == {np.dtype("int64")}


def test_no_sample_crosses_into_another_split(tmp_path: Path) -> None:
    prefix = megatron(tmp_path / "t", [[d] * 10 for d in range(10)])  # document d is ten times the token d
    seen = {}
    for split in ("train", "val", "test"):
        data = dataset(prefix, split, seq_length=3, split=[6, 3, 1])
        seen[split] = {
            int(t) for i in range(len(data)) for t in [*data.get(i, RNG)["input_ids"], *data.get(i, RNG)["labels"]]
        }
    assert seen == {"train": set(range(6)), "val": {6, 7, 8}, "test": {9}}


def test_a_batch_is_two_matrices(tmp_path: Path) -> None:
    data = dataset(megatron(tmp_path / "t", [list(range(100))]), seq_length=8, split=[1])
    batch = data.collate([data.get(i, RNG) for i in range(4)])
    assert {key: tuple(value.shape) for key, value in batch.items()} == {
        "input_ids": (4, 8),
        "labels": (4, 8),
    }


def test_a_dataset_reaches_a_worker_as_a_name(tmp_path: Path) -> None:
    data = dataset(megatron(tmp_path / "t", [list(range(50_000))]), seq_length=8, split=[1])
    pickled = pickle.dumps(data)
    assert len(pickled) < 2000
    assert pickle.loads(pickled).get(7, RNG)["labels"].tolist() == data.get(7, RNG)["labels"].tolist()


# ---- splits


@pytest.mark.parametrize(
    ("split", "documents", "bounds"),
    [
        ([949, 50, 1], 1000, [0, 949, 999, 1000]),
        ([949, 50, 1], 60, [0, 57, 60, 60]),  # 56.94, 3.0, 0.06 documents
        (
            [949, 50, 1],
            10,
            [0, 10, 10, 10],
        ),  # 9.49 and 0.5 round to 9 and 0: one too few, so every end moves up
        ([400, 300, 300], 50, [0, 20, 35, 50]),
        ([1, 1, 1], 2, [0, 0, 1, 2]),  # three times 0.67 round to 3: one too many
        ([1], 7, [0, 7, 7, 7]),
        ([0, 1, 1], 3, [0, 0, 1, 3]),  # Megatron would begin before the first document
    ],
)
def test_documents_are_dealt_out_as_megatron_did(split: list[float], documents: int, bounds: list[int]) -> None:
    assert split_bounds(split, documents, "legacy") == bounds


@pytest.mark.parametrize(
    ("split", "documents", "bounds"),
    [
        ([949, 50, 1], 10, [0, 9, 10, 10]),
        ([949, 50, 1], 60, [0, 57, 60, 60]),
        ([949, 50, 1], 1000, [0, 949, 999, 1000]),
        ([1, 1, 1], 2, [0, 1, 1, 2]),
        ([1, 1], 5, [0, 2, 5, 5]),  # 2.5 rounds to the even number
        ([1], 7, [0, 7, 7, 7]),
    ],
)
def test_documents_are_dealt_out_as_megatron_core_does(split: list[float], documents: int, bounds: list[int]) -> None:
    assert split_bounds(split, documents) == bounds


def core_ranges(split: list[float], elements: int) -> list[tuple[int, int]]:
    """Ranges of Megatron Core's splits, by its own steps: normalize, add up, take book ends, round both."""
    weights = np.array([*split, 0.0, 0.0][:3], dtype=np.float64)
    vector = (weights / np.sum(weights)).tolist()
    ends = [0]
    for share in vector:
        ends.append(ends[-1] + share)
    found = []
    for first, last in pairwise(ends):
        book_ends = round(first * float(elements)), round(last * float(elements))
        found.append((0, 0) if last <= first else book_ends)
    return found


@given(
    st.lists(st.integers(0, 1000) | st.floats(0, 100), min_size=1, max_size=3).filter(lambda s: sum(s) > 1e-6),
    st.integers(1, 10**9),
)
@example([949, 50, 1], 10)
@example([0.1, 0.2, 0.7], 10**9)
def test_every_number_of_documents_is_dealt_out_as_megatron_core_does(split: list[float], documents: int) -> None:
    bounds = split_bounds([float(share) for share in split], documents)
    for (first, last), expected in zip(pairwise(bounds), core_ranges(split, documents), strict=True):
        assert (first, last) == expected or (first >= last and expected[0] >= expected[1])


def test_splits_of_ten_documents_hold_core_s_tokens(tmp_path: Path) -> None:
    prefix = megatron(tmp_path / "t", [[d] * 11 for d in range(10)])

    def tokens(name: str, rounding: str) -> tuple[int, int]:
        data = dataset(prefix, name, seq_length=10, split=[949, 50, 1], split_rounding=rounding)
        return data.start, data.stop

    assert tokens("train", "core") == (0, 99)
    assert tokens("val", "core") == (99, 110)
    assert tokens("train", "legacy") == (0, 110)


def test_core_deals_out_the_sentences_of_documents(tmp_path: Path) -> None:
    index, header = megatron(tmp_path / "t", [[d] * 11 for d in range(10)]).with_suffix(".idx"), 9 + 8 + 1 + 8 + 8
    content = bytearray(index.read_bytes())  # made one document of 10 sentences, as --split-sentences writes it
    content[header - 8 : header] = (2).to_bytes(8, "little")
    index.write_bytes(bytes(content[: header + 12 * 10]) + np.array([0, 10], "<i8").tobytes())
    train, val = (dataset(tmp_path / "t", name, seq_length=10, split=[8, 2]) for name in ("train", "val"))
    assert (train.start, train.stop, val.start, val.stop) == (0, 88, 88, 110)


def test_a_split_without_a_sample_says_what_to_change(tmp_path: Path) -> None:
    prefix = megatron(tmp_path / "t", [[1] * 100] * 9 + [[1] * 5])
    assert len(dataset(prefix, "train", seq_length=10, split=[9, 1])) == 89  # others do not stand in its way
    with pytest.raises(DataError) as error:
        dataset(prefix, "val", seq_length=10, split=[9, 1])
    for part in ("val split", "5 of 905 tokens in 10 documents", "= 11", "second number", "at most 4"):
        assert part in str(error.value)
    with pytest.raises(DataError, match=r"test split .* 0 of 905 tokens.*third number"):
        dataset(prefix, "test", seq_length=10)


def test_a_single_document_is_split_by_its_tokens(tmp_path: Path) -> None:
    prefix = megatron(tmp_path / "t", [list(range(100))])
    seen = {}
    for split in ("train", "val", "test"):
        data = dataset(prefix, split, seq_length=4, split=[80, 15, 5])
        ids = np.concatenate([data.get(i, RNG)["input_ids"] for i in range(len(data))])
        seen[split] = ids.min(), data.get(len(data) - 1, RNG)["labels"].max()
    assert seen == {"train": (0, 76), "val": (80, 92), "test": (95, 99)}
    assert len(dataset(prefix, seq_length=33, split=[1])) == 3
    with pytest.raises(DataError, match=r"it gets 5 of 100 tokens in 1 documents, .*third number .*at most 4"):
        dataset(prefix, "test", seq_length=5, split=[80, 15, 5])


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"seq_length": 0}, "seq_length: expected a whole number of at least 1, got 0"),
        ({"seq_length": 8, "split": []}, "split: "),
        ({"seq_length": 8, "split": [0, 0]}, "split: "),
        ({"seq_length": 8, "split": [2, -1]}, "split.1: expected a number of at least 0, got -1"),
        ({"seq_length": 8, "split": [1, 1, 1, 1]}, "split: "),
        ({"seq_length": 8, "vocab_file": "vocab.json"}, "vocab_file and merge_file go together"),
    ],
)
def test_impossible_options_are_refused_before_any_file_is_read(options: dict, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        Checker(".".join).dataclass(TextDataset.Options, {"path": "data", **options}, ())


# ---- where tokens come from


def test_megatron_files_are_found_by_prefix_file_or_folder(tmp_path: Path) -> None:
    prefix = megatron(tmp_path / "meg-gpt2_text_document", [list(range(20))])
    for path in (prefix, prefix.with_suffix(".idx"), prefix.with_suffix(".bin"), tmp_path):
        assert len(dataset(path, seq_length=4, split=[1])) == 4
    data = dataset(prefix, seq_length=4, split=[1])
    assert (data.vocab_size, data.tokenizer_path) == (None, None)
    megatron(tmp_path / "other", [[1]])
    with pytest.raises(DataError, match=r"several token files .*meg-gpt2_text_document, other"):
        dataset(tmp_path, seq_length=4)
    with pytest.raises(DataError, match=r"no tokens at .*nowhere"):
        dataset(tmp_path / "nowhere", seq_length=4)


def test_megatron_files_take_their_tokenizer_from_the_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    trained = train_bpe(["so so so so"], 300)
    trained.save(tmp_path / "hf")
    trained.backend.model.save(str(tmp_path))  # vocab.json, merges.txt
    prefix = megatron(tmp_path / "t", [trained.encode("so so"), [trained.end_id] * 5])
    gpt2 = {"vocab_file": str(tmp_path / "vocab.json"), "merge_file": str(tmp_path / "merges.txt")}
    for options in (gpt2, {"tokenizer": str(tmp_path / "hf")}):
        data = dataset(prefix, seq_length=1, split=[1], **options)
        assert (data.vocab_size, data.eod_id) == (trained.vocab_size, trained.end_id)
        assert load_tokenizer(data.tokenizer_path).encode("so so") == trained.encode("so so")


def test_tokens_beyond_the_vocabulary_are_refused(tmp_path: Path) -> None:
    wanted, output = prepared(tmp_path, ["a b c"] * 20)
    TextDataset.prepare(TextDataset.Options(path=str(output), seq_length=4, prepare=wanted))
    megatron(output / "tokens", [[1, 2, 3], [4, 5, 60_000]])
    data = dataset(output, seq_length=5, split=[1])
    with pytest.raises(DataError, match=r"tokens\.bin contains token 60000"):
        data.get(0, RNG)


def test_a_missing_dataset_is_made_once_and_then_left_alone(tmp_path: Path) -> None:
    wanted, output = prepared(tmp_path, ["some words", "more words"] * 20)
    options = TextDataset.Options(path=str(output), seq_length=8, prepare=wanted, split=[8, 1, 1])
    assert not TextDataset.is_prepared(options)
    TextDataset.prepare(options)
    assert TextDataset.is_prepared(options)
    stamp = (output / "tokens.bin").stat().st_mtime_ns
    TextDataset.prepare(options)
    assert (output / "tokens.bin").stat().st_mtime_ns == stamp
    data = TextDataset(options, "val")
    assert data.tokenizer_path == output / "tokenizer"
    assert data.eod_id == data.vocab_size - 1


def test_a_dataset_made_otherwise_is_not_passed_off_as_the_one_asked_for(tmp_path: Path) -> None:
    wanted, output = prepared(tmp_path, ["some words"] * 20)
    TextDataset.prepare(TextDataset.Options(path=str(output), seq_length=8, prepare=wanted))
    wanted.separator = "---"
    with pytest.raises(DataError, match=r"prepared with separator=None, but prepare\.separator is now '---'"):
        TextDataset.prepare(TextDataset.Options(path=str(output), seq_length=8, prepare=wanted))


def test_nothing_there_and_no_way_to_make_it_is_said_before_training(tmp_path: Path) -> None:
    options = TextDataset.Options(path=str(tmp_path / "web"), seq_length=8)
    assert TextDataset.is_prepared(options)
    with pytest.raises(DataError, match="crosstrain prepare"):
        TextDataset.prepare(options)
