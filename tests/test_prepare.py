"""From files to tokens: what is read, what is refused and where, what is written, and that it is all or nothing."""

from __future__ import annotations

import hashlib
import json
import sysconfig
import threading
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from filelock import FileLock
from hypothesis import given, settings
from hypothesis import strategies as st

from conftest import TEXTS
from crosstrain.check import OptionError
from crosstrain.data import corpus
from crosstrain.data import prepare as module
from crosstrain.data.prepare import PrepareOptions, Summary, prepare
from crosstrain.data.tokenizer import load_tokenizer
from crosstrain.data.tokens import TokenFile
from crosstrain.errors import DataError


def json_lines(path: Path, texts: list[str], key: str = "text") -> Path:
    path.write_text("".join(json.dumps({key: text, "url": "u"}) + "\n" for text in texts))
    return path


def read(*inputs: Path, key: str = "text", separator: str | None = None) -> list[str]:
    return list(corpus.documents([str(path) for path in inputs], key, separator))


# ---- documents


def test_the_standard_library_is_always_there_in_the_same_order() -> None:
    texts = list(islice(corpus.documents("stdlib"), 300))
    assert texts == list(islice(corpus.documents("stdlib"), 300))
    assert (Path(sysconfig.get_paths()["stdlib"]) / "argparse.py").read_text() in texts


def test_text_files_are_documents_in_sorted_order_at_any_depth(tmp_path: Path) -> None:
    (tmp_path / "b" / "deep").mkdir(parents=True)
    for name, text in {"c.txt": "last", "b/deep/z.txt": "second", "a.txt": "first\r\n"}.items():
        (tmp_path / name).write_bytes(text.encode())
    (tmp_path / "blank.txt").write_text(" \n ")
    (tmp_path / "picture.png").write_bytes(b"\xff")
    assert read(tmp_path) == ["first\r\n", "second", "last"]
    assert read(tmp_path / "c.txt", tmp_path / "b") == ["last", "second"]


def test_json_lines_and_parquet_give_the_chosen_field(tmp_path: Path) -> None:
    json_lines(tmp_path / "1.jsonl", TEXTS, key="body")
    with open(tmp_path / "1.jsonl", "a") as file:
        file.write("\n")  # a blank line is nothing
    pyarrow.parquet.write_table(pyarrow.table({"body": ["p", None, "q"], "n": [1, 2, 3]}), tmp_path / "2.parquet")
    assert read(tmp_path, key="body") == [*TEXTS, "p", "q"]


@settings(deadline=None)
@given(st.text(alphabet="ab\n☃", max_size=60), st.integers(1, 7))
def test_a_separator_cuts_a_text_file_wherever_chunks_end(
    tmp_path_factory: pytest.TempPathFactory, text: str, chunk: int
) -> None:
    file = tmp_path_factory.mktemp("cut") / "t.txt"
    file.write_bytes(b"\xef\xbb\xbf" + ("a\n\n" + text).encode())  # editors put a byte order mark first
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus, "_CHUNK_BYTES", chunk)
        expected = [part for part in ("a\n\n" + text).split("\n\n") if part and not part.isspace()]
        assert [part.removeprefix("\ufeff") for part in read(file, separator="\n\n")] == expected


def test_what_cannot_be_read_is_named_with_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def complaint(name: str, content: bytes) -> str:
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError) as error:
            read(tmp_path / name)
        return str(error.value)

    monkeypatch.setattr(corpus, "_CHUNK_BYTES", 4)
    good = b'{"text": "fine"}\n'
    assert "bad.txt is not UTF-8 text: invalid at byte 9" in complaint("bad.txt", "☃☃☃".encode() + b"\xff!")
    assert "cut.txt is not UTF-8 text: invalid at byte 6" in complaint("cut.txt", "☃☃☃".encode()[:-1])
    assert "b.jsonl:2 is not UTF-8 text: invalid at byte 27" in complaint("b.jsonl", good + b'{"text": "\xff"}\n')
    assert "c.jsonl:3 is not a JSON object" in complaint("c.jsonl", good + good + b'{"text": "cut')
    assert "it has 'body', 'url'; set text_key" in complaint("d.jsonl", b'{"body": "x", "url": "u"}\n')
    assert "e.jsonl:1" in complaint("e.jsonl", b'["text"]\n')
    assert "f.jsonl:2" in complaint("f.jsonl", good + b'{"text": 5}\n')
    assert "g.jsonl:1" in complaint("g.jsonl", b'{"text": "half a pair \\ud83d"}\n')
    assert "h.parquet is not a readable Parquet file" in complaint("h.parquet", b"PAR1 not at all")
    assert "empty.txt holds no document" in complaint("empty.txt", b"")
    assert "blank.jsonl holds no document" in complaint("blank.jsonl", good.replace(b"fine", b"  "))


def test_parquet_without_the_column_says_which_there_are(tmp_path: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"body": ["p"], "n": [1]}), tmp_path / "t.parquet")
    with pytest.raises(DataError, match="no column 'text'; it has body, n"):
        read(tmp_path)
    with pytest.raises(DataError, match=r"column 'n' of .* holds int"):
        read(tmp_path, key="n")


def test_an_input_that_gives_nothing_says_why(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nowhere does not exist"):
        read(tmp_path / "nowhere")
    (tmp_path / "page.md").write_text("text")
    with pytest.raises(DataError, match=r"holds no \.txt.*found: 1 with \.md"):
        read(tmp_path)
    (tmp_path / "good.txt").write_text("text")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"empty holds no \.txt.*found: nothing"):
        read(tmp_path / "good.txt", tmp_path / "empty")  # one good input does not excuse the other


# ---- prepared folders


def options(path: Path, tokenizer: Path, **more: object) -> PrepareOptions:
    return PrepareOptions(input=str(path), tokenizer=str(tokenizer), **more)  # type: ignore[arg-type]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_prepared_folder_holds_every_document_and_its_end(tokenizer: Path, tmp_path: Path) -> None:
    source = json_lines(tmp_path / "t.jsonl", TEXTS)
    summary = prepare(options(source, tokenizer), tmp_path / "out", progress=False)
    file, loaded = TokenFile(tmp_path / "out" / "tokens"), load_tokenizer(tmp_path / "out" / "tokenizer")
    file.verify()
    documents = [file.document(d).tolist() for d in range(file.num_documents)]
    assert [loaded.decode(document[:-1]) for document in documents] == TEXTS
    assert {document[-1] for document in documents} == {summary.eod_id} == {loaded.end_id}
    assert (summary.documents, summary.dropped, summary.tokens) == (3, 0, file.num_tokens)
    assert summary.text_bytes == sum(len(text.encode()) for text in TEXTS)
    assert (summary.vocab_size, summary.dtype) == (loaded.vocab_size, "uint16")
    content = (tmp_path / "out" / "tokenizer" / "tokenizer.json").read_bytes()
    assert summary.tokenizer_sha256 == hashlib.sha256(content).hexdigest()
    assert Summary.read(tmp_path / "out") == summary
    assert names(tmp_path) == ["out", "t.jsonl"]
    assert names(tmp_path / "out") == ["dataset.json", "tokenizer", "tokens.bin", "tokens.idx"]


def test_a_tokenizer_can_be_trained_on_the_way(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = json_lines(tmp_path / "t.jsonl", TEXTS * 2)
    wanted = PrepareOptions(input=str(source), train_tokenizer=50257)
    summary = prepare(wanted, tmp_path / "out", progress=False)
    assert 257 < summary.vocab_size < 1000
    assert summary.eod_id == summary.vocab_size - 1
    assert f"the tokenizer has {summary.vocab_size}" in caplog.text


def test_short_documents_are_dropped_and_counted(tokenizer: Path, tmp_path: Path) -> None:
    source = json_lines(tmp_path / "t.jsonl", ["a", *TEXTS, "b"])
    summary = prepare(options(source, tokenizer, min_tokens=2), tmp_path / "out", progress=False)
    assert (summary.documents, summary.dropped) == (3, 2)
    with pytest.raises(DataError, match=r"all 5 documents .* shorter than min_tokens=999"):
        prepare(options(source, tokenizer, min_tokens=999), tmp_path / "none", progress=False)
    assert not (tmp_path / "none").exists()


def test_exactly_one_tokenizer_is_asked_for() -> None:
    for both_or_none in ({}, {"tokenizer": "gpt2", "train_tokenizer": 300}):
        with pytest.raises(OptionError, match="either tokenizer"):
            PrepareOptions(input="stdlib", **both_or_none)  # type: ignore[arg-type]


def test_documents_are_read_no_faster_than_they_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_BATCH_CHARACTERS", 100)
    read_so_far = 0

    def endless() -> Iterator[str]:
        nonlocal read_so_far
        while True:
            read_so_far += 1
            yield "x" * 30

    batches = module._batches(endless())
    assert [len(next(batches)) for _ in range(5)] == [4] * 5
    assert read_so_far == 20


def test_an_existing_dataset_is_replaced_only_on_request(tokenizer: Path, tmp_path: Path) -> None:
    first, second = json_lines(tmp_path / "1.jsonl", TEXTS), json_lines(tmp_path / "2.jsonl", TEXTS[:1])
    prepare(options(first, tokenizer), tmp_path / "out", progress=False)
    with pytest.raises(DataError, match="prepared already"):
        prepare(options(second, tokenizer), tmp_path / "out", progress=False)
    assert Summary.read(tmp_path / "out").documents == 3
    prepare(options(second, tokenizer), tmp_path / "out", progress=False, overwrite=True)
    assert Summary.read(tmp_path / "out").documents == 1
    assert names(tmp_path) == ["1.jsonl", "2.jsonl", "out"]


def test_what_is_not_a_dataset_is_never_replaced(tokenizer: Path, tmp_path: Path) -> None:
    source = json_lines(tmp_path / "t.jsonl", TEXTS)
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter1.tex").write_text("years of work")
    for output in (tmp_path / "thesis", source):
        with pytest.raises(DataError, match="not a prepared dataset"):
            prepare(options(source, tokenizer), output, progress=False, overwrite=True)
    assert (tmp_path / "thesis" / "chapter1.tex").exists()
    (tmp_path / "empty").mkdir()
    assert prepare(options(source, tokenizer), tmp_path / "empty", progress=False).documents == 3


def test_a_failure_leaves_what_was_there_before(tokenizer: Path, tmp_path: Path) -> None:
    source = json_lines(tmp_path / "t.jsonl", TEXTS)
    prepare(options(source, tokenizer), tmp_path / "out", progress=False)
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").glob("*.*")}
    with open(source, "a") as file:
        file.write("{broken\n")
    for output in ("out", "new"):
        with pytest.raises(DataError, match=r"t\.jsonl:4"):
            prepare(options(source, tokenizer), tmp_path / output, progress=False, overwrite=True)
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").glob("*.*")} == before
    assert [name for name in names(tmp_path) if not name.endswith(".lock")] == ["out", "t.jsonl"]


def test_the_remains_of_a_killed_process_do_not_matter(tokenizer: Path, tmp_path: Path) -> None:
    source = json_lines(tmp_path / "t.jsonl", TEXTS)
    (tmp_path / ".out.partial" / "tokenizer").mkdir(parents=True)
    (tmp_path / ".out.partial" / "tokens.bin").write_bytes(b"half")
    (tmp_path / ".out.lock").touch()
    assert prepare(options(source, tokenizer), tmp_path / "out", progress=False).documents == 3
    assert names(tmp_path) == ["out", "t.jsonl"]


def test_a_second_writer_is_told_so(tokenizer: Path, tmp_path: Path) -> None:
    source = json_lines(tmp_path / "t.jsonl", TEXTS)
    with FileLock(tmp_path / ".out.lock"), pytest.raises(DataError, match="another process is preparing"):
        prepare(options(source, tokenizer), tmp_path / "out", progress=False)


def test_writers_that_wait_share_one_result(tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = json_lines(tmp_path / "t.jsonl", TEXTS)
    built, build = [], module._build
    monkeypatch.setattr(module, "_build", lambda *arguments: built.append(1) or build(*arguments))
    summaries: list[Summary] = []

    def work() -> None:
        summaries.append(prepare(options(source, tokenizer), tmp_path / "out", progress=False, wait=True))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert built == [1]
    assert summaries == [Summary.read(tmp_path / "out")] * 4


@pytest.mark.parametrize("content", ["", "[]", '{"format_version": 1}', '{"format_version": 99}'])
def test_a_description_that_cannot_be_used_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "dataset.json").write_text(content)
    with pytest.raises(DataError, match=r"dataset\.json .*prepare it again"):
        Summary.read(tmp_path)
