"""From files to tokens: what is written, and that it is all or nothing."""

from __future__ import annotations

import hashlib
import threading
from pathlib import Path

import pytest
from crosstrain_plugins.builtin.commands.prepare import pipeline
from crosstrain_plugins.builtin.commands.prepare.options import PrepareOptions
from crosstrain_plugins.builtin.commands.prepare.prepare import prepare
from crosstrain_plugins.builtin.datasets.indexed_dataset import TokenFile
from crosstrain_plugins.builtin.datasets.prepared import Summary
from filelock import FileLock

from conftest import TEXTS, json_lines
from crosstrain import registry
from crosstrain.config.schema import Component, OptionError
from crosstrain.data.tokenizer import load_tokenizer
from crosstrain.utils.errors import DataError

# ---- prepared folders


def options(path: Path, tokenizer: Path, **more: object) -> PrepareOptions:
    return PrepareOptions(input=str(path), tokenizer=str(tokenizer), **more)  # type: ignore[arg-type]


def longer(tokens: int) -> list[Component]:
    options = registry.get("processor", "document_length").Options(min_tokens=tokens)
    return [Component("document_length", options)]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.suffix != ".lock")


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
    files = ["dataset.json", "report.json", "tokenizer", "tokens.bin", "tokens.idx"]
    assert names(tmp_path / "out") == files


def test_a_tokenizer_can_be_trained_on_the_way(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = json_lines(tmp_path / "t.jsonl", TEXTS * 2)
    wanted = PrepareOptions(input=str(source), train_tokenizer=50257)
    summary = prepare(wanted, tmp_path / "out", progress=False)
    assert 257 < summary.vocab_size < 1000
    assert summary.eod_id == summary.vocab_size - 1
    assert f"the tokenizer has {summary.vocab_size}" in caplog.text


def test_short_documents_are_dropped_and_counted(tokenizer: Path, tmp_path: Path) -> None:
    source = json_lines(tmp_path / "t.jsonl", ["a", *TEXTS, "b"])
    summary = prepare(options(source, tokenizer, clean=longer(2)), tmp_path / "out", progress=False)
    assert (summary.documents, summary.dropped) == (3, 2)
    with pytest.raises(DataError, match=r"all 5 documents were dropped: 5 by document_length"):
        prepare(options(source, tokenizer, clean=longer(999)), tmp_path / "none", progress=False)
    assert not (tmp_path / "none").exists()


def test_exactly_one_tokenizer_is_asked_for() -> None:
    for both_or_none in ({}, {"tokenizer": "gpt2", "train_tokenizer": 300}):
        with pytest.raises(OptionError, match="either tokenizer"):
            PrepareOptions(input="stdlib", **both_or_none)  # type: ignore[arg-type]


def test_an_existing_dataset_is_replaced_only_on_request(tokenizer: Path, tmp_path: Path) -> None:
    first, second = json_lines(tmp_path / "1.jsonl", TEXTS), json_lines(tmp_path / "2.jsonl", TEXTS[:1])
    prepare(options(first, tokenizer), tmp_path / "out", progress=False)
    with pytest.raises(DataError, match="already prepared"):
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
    assert names(tmp_path) == ["out", "t.jsonl"]


def test_the_remains_of_a_killed_process_do_not_matter(tokenizer: Path, tmp_path: Path) -> None:
    source = json_lines(tmp_path / "t.jsonl", TEXTS)
    (tmp_path / "out.partial" / "tokenizer").mkdir(parents=True)
    (tmp_path / "out.partial" / "tokens.bin").write_bytes(b"half")
    (tmp_path / ".out.lock").touch()
    assert prepare(options(source, tokenizer), tmp_path / "out", progress=False).documents == 3
    assert names(tmp_path) == ["out", "t.jsonl"]


def test_a_second_writer_is_told_so(tokenizer: Path, tmp_path: Path) -> None:
    source = json_lines(tmp_path / "t.jsonl", TEXTS)
    with FileLock(tmp_path / ".out.lock"), pytest.raises(DataError, match="another process is preparing"):
        prepare(options(source, tokenizer), tmp_path / "out", progress=False)


def test_writers_that_wait_share_one_result(tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = json_lines(tmp_path / "t.jsonl", TEXTS)
    built, run = [], pipeline.Pipeline.run
    monkeypatch.setattr(pipeline.Pipeline, "run", lambda self: built.append(1) or run(self))
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
