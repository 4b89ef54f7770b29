"""Megatron's .bin/.idx files: read as the format says, written so that an independent reader agrees, damage named."""

from __future__ import annotations

import contextlib
import itertools
import pickle
import struct
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from crosstrain_plugins.builtin.datasets import indexed_dataset
from crosstrain_plugins.builtin.datasets.indexed_dataset import TokenFile, TokenWriter, best_dtype
from hypothesis import given, settings
from hypothesis import strategies as st

from crosstrain.utils.errors import DataError

CODES = {1: "B", 2: "b", 3: "h", 4: "i", 5: "q", 8: "H"}  # dtype code -> struct letter


def megatron_files(prefix: Path, documents: list[list[list[int]]], code: int) -> None:
    """Lay out documents (each a list of sequences) byte by byte, from the format's description."""
    sequences = [sequence for document in documents for sequence in document]
    letter = CODES[code]
    width = struct.calcsize("<" + letter)
    index, address, first = b"MMIDIDX\x00\x00" + struct.pack("<Q", 1) + struct.pack("<B", code), 0, 0
    index += struct.pack("<Q", len(sequences)) + struct.pack("<Q", len(documents) + 1)
    for sequence in sequences:
        index += struct.pack("<i", len(sequence))
    for sequence in sequences:
        index += struct.pack("<q", address)
        address += width * len(sequence)
    index += struct.pack("<q", 0)
    for document in documents:
        first += len(document)
        index += struct.pack("<q", first)
    data = b"".join(struct.pack(f"<{len(sequence)}{letter}", *sequence) for sequence in sequences)
    prefix.with_name(prefix.name + ".idx").write_bytes(index)
    prefix.with_name(prefix.name + ".bin").write_bytes(data)


def reference_read(prefix: Path) -> tuple[int, list[list[list[int]]]]:
    """(dtype code, documents), by an independent reading of the format."""
    index = prefix.with_name(prefix.name + ".idx").read_bytes()
    data = prefix.with_name(prefix.name + ".bin").read_bytes()
    assert index[:9] == b"MMIDIDX\x00\x00"
    version, code, n, d = struct.unpack_from("<QBQQ", index, 9)
    assert version == 1
    sizes = struct.unpack_from(f"<{n}i", index, 34)
    pointers = struct.unpack_from(f"<{n}q", index, 34 + 4 * n)
    bounds = struct.unpack_from(f"<{d}q", index, 34 + 12 * n)
    assert len(index) == 34 + 12 * n + 8 * d
    sequences = [list(struct.unpack_from(f"<{s}{CODES[code]}", data, p)) for s, p in zip(sizes, pointers, strict=True)]
    return code, [sequences[a:b] for a, b in itertools.pairwise(bounds)]


def write(prefix: Path, documents: list[list[int]], dtype: str = "uint16") -> None:
    with TokenWriter(prefix, dtype) as writer:
        writer.add(documents)


def damage(path: Path, offset: int, new: bytes) -> None:
    data = bytearray(path.read_bytes())
    data[offset : offset + len(new)] = new
    path.write_bytes(data)


# ---- reading


@pytest.mark.parametrize("code", CODES)
def test_reads_every_integer_type(tmp_path: Path, code: int) -> None:
    megatron_files(tmp_path / "meg-gpt2_text_document", [[[1, 2, 3]], [[4], [5, 6]], [[7]]], code)
    file = TokenFile(tmp_path / "meg-gpt2_text_document")
    assert (file.num_documents, file.num_sequences, file.num_tokens) == (3, 4, 7)
    assert file.tokens(0, 7).tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert file.tokens(2, 5).tolist() == [3, 4, 5]
    assert [file.document_start(d) for d in range(4)] == [0, 3, 6, 7]
    assert [file.document(d).tolist() for d in range(3)] == [[1, 2, 3], [4, 5, 6], [7]]
    file.verify()


def test_large_ids_and_empty_documents_survive(tmp_path: Path) -> None:
    megatron_files(tmp_path / "t", [[], [[65535]], [[]], [[], [9]], []], code=8)
    file = TokenFile(tmp_path / "t")
    assert [file.document(d).tolist() for d in range(5)] == [[], [65535], [], [9], []]


def test_no_document_at_all_is_a_valid_file(tmp_path: Path) -> None:
    megatron_files(tmp_path / "t", [], code=4)
    file = TokenFile(tmp_path / "t")
    file.verify()
    assert (file.num_documents, file.num_tokens, file.tokens(0, 0).size) == (0, 0, 0)


@given(st.lists(st.lists(st.integers(0, 3), max_size=3), min_size=1, max_size=40), st.sampled_from([1, 3, 4096]))
def test_the_document_of_a_token_is_found_wherever_long_ones_lie(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[list[int]], near: int
) -> None:
    prefix = tmp_path_factory.mktemp("tokens") / "t"
    megatron_files(prefix, [[[7] * (length**5) for length in document] for document in lengths], code=1)
    file = TokenFile(prefix)
    starts = np.array([file.document_start(d) for d in range(file.num_documents)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(indexed_dataset, "_NEAR", near)
        for position in range(0, file.num_tokens, 1 + file.num_tokens // 100):
            assert file.document_at(position) == np.flatnonzero(starts <= position)[-1]


def test_few_reads_find_a_document_among_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "t", [[1] * (1 + n % 3) for n in range(20_000)])
    file, read = TokenFile(tmp_path / "t"), list[int]()
    start = file.document_start
    monkeypatch.setattr(file, "document_start", lambda document: read.append(document) or start(document))
    assert file.document_at(20_000) == 10_000
    assert len(read) <= 2 + 13
    assert max(read) - min(read) <= 2 * indexed_dataset._NEAR  # blocks of an index that lie together


def test_asking_beyond_the_end_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "t", [[1, 2], [3]])
    file = TokenFile(tmp_path / "t")
    for start, stop in ((0, 4), (-1, 2), (2, 1)):
        with pytest.raises(IndexError, match="3 tokens"):
            file.tokens(start, stop)
    with pytest.raises(IndexError, match="document 3 is out of range"):
        file.document_start(3)


def test_a_pickled_file_is_its_name(tmp_path: Path) -> None:
    write(tmp_path / "t", [list(range(50_000))])
    pickled = pickle.dumps(TokenFile(tmp_path / "t"))
    assert len(pickled) < 1000
    assert pickle.loads(pickled).tokens(10, 12).tolist() == [10, 11]


def test_opening_does_not_read_the_index(tmp_path: Path) -> None:
    """30 million sequences: 600 MB of index on a sparse file, whose zeros are consistent empty sequences."""
    n = 30_000_000
    with open(tmp_path / "t.idx", "wb") as file:
        file.write(b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, n, n + 1))
        file.seek(34 + 12 * n + 8 * n)
        file.write(struct.pack("<q", n))
    (tmp_path / "t.bin").touch()
    tracemalloc.start()
    seconds = []
    for _ in range(3):  # the first touches cold pages, whose price is the disk's
        started = time.perf_counter()
        assert TokenFile(tmp_path / "t").num_documents == n
        seconds.append(time.perf_counter() - started)
    assert tracemalloc.get_traced_memory()[1] < 1_000_000
    tracemalloc.stop()
    assert min(seconds) < 0.05


# ---- writing


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(0, 65535), max_size=8), max_size=20), st.integers(1, 5))
def test_an_independent_reader_reads_what_was_written(
    tmp_path_factory: pytest.TempPathFactory, documents: list[list[int]], per_call: int
) -> None:
    prefix = tmp_path_factory.mktemp("round_trip") / "t"
    with TokenWriter(prefix, "uint16") as writer:
        for i in range(0, len(documents), per_call):
            writer.add(documents[i : i + per_call])
    assert (writer.num_documents, writer.num_tokens) == (len(documents), sum(map(len, documents)))
    assert reference_read(prefix) == (8, [[document] for document in documents])
    file = TokenFile(prefix)
    file.verify()
    assert [file.document(d).tolist() for d in range(len(documents))] == documents


def test_width_follows_the_vocabulary_as_in_megatron() -> None:
    assert best_dtype(50257) == np.uint16
    assert best_dtype(65499) == np.uint16
    assert best_dtype(65500) == np.int32
    assert best_dtype(151_936) == np.int32


def test_an_id_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="65536 do not fit into uint16"):
        write(tmp_path / "t", [[1, 65536]])
    with pytest.raises(DataError, match="-1 to 1 do not fit"):
        write(tmp_path / "t", [[1, -1]])


def test_a_failed_write_leaves_nothing_behind(tmp_path: Path) -> None:
    with contextlib.suppress(KeyboardInterrupt), TokenWriter(tmp_path / "t", "uint16") as writer:
        writer.add([[1, 2, 3]])
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


def test_files_keep_their_old_content_until_the_new_one_is_complete(tmp_path: Path) -> None:
    write(tmp_path / "t", [[1]])
    with TokenWriter(tmp_path / "t", "uint16") as writer:
        writer.add([[2, 3]])
        assert TokenFile(tmp_path / "t").tokens(0, 1).tolist() == [1]
    assert TokenFile(tmp_path / "t").tokens(0, 2).tolist() == [2, 3]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["t.bin", "t.idx"]


# ---- damage


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"t\.idx does not exist"):
        TokenFile(tmp_path / "t")
    write(tmp_path / "t", [[1]])
    (tmp_path / "t.bin").unlink()
    with pytest.raises(DataError, match=r"t\.bin does not exist"):
        TokenFile(tmp_path / "t")


@pytest.mark.parametrize(
    ("offset", "new", "complaint"),
    [
        (0, b"TNTIDX\x00\x00", "not a Megatron index"),
        (9, b"\x02", "format version 2"),
        (17, b"\x06", "dtype code 6"),
        (18, b"\x04", "is truncated"),
        (18, b"\x02", "is too long"),
        (34, b"\x05", "sequence 0 does not end where"),  # size of the first sequence
        (34 + 8, b"\x05", r"t\.bin is truncated"),  # size of the last one
        (34 + 12, b"\x02", "sequence 0 does not end where"),  # pointer of the first
        (34 + 12 + 9, b"\x80", "sequence 0 does not end where"),  # pointer of the second
        (34 + 36, b"\x01", "document index"),  # its first entry
        (34 + 36 + 24, b"\x07", "document index"),  # its last one
    ],
)
def test_a_damaged_index_is_named(tmp_path: Path, offset: int, new: bytes, complaint: str) -> None:
    write(tmp_path / "t", [[1, 2, 3], [4], [5, 6]])
    damage(tmp_path / "t.idx", offset, new)
    with pytest.raises(DataError, match=complaint):
        TokenFile(tmp_path / "t")


@pytest.mark.parametrize("name", ["t.idx", "t.bin"])
@pytest.mark.parametrize("keep", [0, 10, 33, -1])
def test_a_truncated_file_is_named(tmp_path: Path, name: str, keep: int) -> None:
    write(tmp_path / "t", [list(range(100)), list(range(50))])
    whole = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(whole[:keep])
    with pytest.raises(DataError, match=rf"{name} is (truncated|not a Megatron index)"):
        TokenFile(tmp_path / "t")


def test_verify_finds_what_opening_cannot_afford_to_look_for(tmp_path: Path) -> None:
    write(tmp_path / "t", [[1]] * 10_000)
    damage(tmp_path / "t.idx", 34 + 4 * 5003, b"\x02")
    file = TokenFile(tmp_path / "t")
    with pytest.raises(DataError, match="sequence 5003 "):
        file.verify()


def test_verify_finds_documents_that_run_backwards(tmp_path: Path) -> None:
    write(tmp_path / "t", [[1], [2], [3]])
    damage(tmp_path / "t.idx", 34 + 36 + 8, struct.pack("<q", 3))
    with pytest.raises(DataError, match="document 1 ends before it begins"):
        TokenFile(tmp_path / "t").verify()


@pytest.mark.slow
def test_offsets_of_many_gigabytes(tmp_path: Path) -> None:
    """Beyond what 32 bits can say; the files are sparse, so the disk holds next to nothing of them."""
    length = (1 << 30) + 7
    with TokenWriter(tmp_path / "large", "uint16") as writer:
        for k in range(3):  # as if three documents of a gigatoken each had been added, all zeros but for one token
            writer._bin.seek(2 * (k + 1) * length - 2)
            writer._bin.write(struct.pack("<H", 60_000 + k))
        writer._sizes.append(np.full(3, length, "<i4"))
        writer.num_documents, writer.num_tokens = 3, 3 * length
    code, index = 8, (tmp_path / "large.idx").read_bytes()
    assert struct.unpack_from("<QBQQ", index, 9) == (1, code, 3, 4)
    assert struct.unpack_from("<3q", index, 34 + 12) == (0, 2 * length, 4 * length)
    file = TokenFile(tmp_path / "large")
    file.verify()
    assert file.num_tokens == 3 * length
    assert file.tokens(3 * length - 2, 3 * length).tolist() == [0, 60_002]
    assert file.document(1)[-1] == 60_001
    assert (tmp_path / "large.bin").stat().st_blocks * 512 < 1 << 20
