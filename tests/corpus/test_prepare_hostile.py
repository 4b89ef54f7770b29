"""Hostile inputs and outputs of `prepare`: a dataset, or one sentence that names what is wrong; no litter."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
import socket
import string
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from crosstrain_plugins.builtin.commands.prepare.options import PrepareOptions
from crosstrain_plugins.builtin.commands.prepare.prepare import prepare
from crosstrain_plugins.builtin.commands.prepare.train_bpe import train_bpe
from crosstrain_plugins.builtin.datasets.indexed_dataset import TokenFile
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from crosstrain.cli import main
from crosstrain.utils.errors import DataError, UserError, sentence

NAME = st.binary(min_size=1, max_size=12).filter(lambda name: not set(name) & {0, ord("/")} and name[:1] != b".")
CONTENT = st.one_of(
    st.binary(max_size=60),
    st.text(max_size=60).map(str.encode),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=60).map(
        lambda text: json.dumps({"text": text}).encode() + b"\n"
    ),
    st.binary(max_size=60).map(gzip.compress),
    st.binary(max_size=60).map(lambda data: gzip.compress(data)[:-3]),
)
ENDING = st.sampled_from([".txt", ".jsonl", ".txt.gz", ".json.bz2", ".TXT", ".xml", ".txt.xz", "", ".parquet"])
KIND = st.sampled_from(["file"] * 6 + ["link", "dangling", "pipe", "folder", "loop"])


def plant(path: bytes, kind: str, content: bytes) -> None:
    match kind:
        case "file":
            with open(path, "wb") as file:
                file.write(content)
        case "link":
            os.symlink(b"good.txt", path)
        case "dangling":
            os.symlink(b"nowhere", path)
        case "pipe":
            os.mkfifo(path)
        case "folder":
            os.mkdir(path)
        case "loop":
            os.symlink(b".", path)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(st.tuples(NAME, ENDING), st.tuples(KIND, CONTENT), max_size=4))
def test_any_folder_is_prepared_or_refused_in_a_sentence(
    tokenizer: Path, tmp_path_factory: pytest.TempPathFactory, planted: dict[tuple[bytes, str], tuple[str, bytes]]
) -> None:
    folder = tmp_path_factory.mktemp("any")
    (folder / "in").mkdir()
    (folder / "in" / "good.txt").write_text("good words")
    kinds: set[str] = set()
    for (name, ending), (kind, content) in planted.items():
        path = os.fsencode(folder / "in") + b"/" + name + ending.encode()
        if not os.path.lexists(path):
            plant(path, kind, content)
            kinds.add(kind)
    before = sorted(os.listdir(os.fsencode(folder / "in")))
    said = None
    try:
        summary = prepare(PrepareOptions(str(folder / "in"), tokenizer=str(tokenizer)), folder / "out", progress=False)
    except UserError as error:
        said = sentence(error)  # as the command line prints it
    if said is not None:
        assert "\n" not in said
        assert said.encode()
        assert str(folder) in said
        assert not (folder / "out").exists()
    else:
        TokenFile(folder / "out" / "tokens").verify()
        assert summary.documents >= 1
        assert kinds <= {"file", "link", "folder"}
        json.loads((folder / "out" / "report.json").read_text())
    assert sorted(os.listdir(os.fsencode(folder / "in"))) == before
    assert not [name for name in os.listdir(folder) if "lock" in name]


def options(path: Path, tokenizer: Path) -> PrepareOptions:
    return PrepareOptions(str(path), tokenizer=str(tokenizer))


def a_socket(path: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # the address of a socket is short
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(path.name)
    os.chdir(here)


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda path: path.symlink_to("nowhere"), "a broken link"), (os.mkfifo, "not a regular file"),
        (a_socket, "not a regular file"), (lambda path: path.symlink_to("/dev/zero"), "not a regular file"),
        (lambda path: path.symlink_to(path.parent), "a link to a folder"),
        (lambda path: path.symlink_to(path), "a broken link"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_named(
    make: Callable[[Path], None], complaint: str, tokenizer: Path, tmp_path: Path
) -> None:
    (tmp_path / "in" / "deeper").mkdir(parents=True)
    (tmp_path / "in" / "good.txt").write_text("good words")
    bad = tmp_path / "in" / "deeper" / "bad.txt"
    make(bad)
    with pytest.raises(DataError, match=rf"{bad} is .*{complaint}"):
        prepare(options(tmp_path / "in", tokenizer), tmp_path / "out", progress=False)
    with pytest.raises(DataError, match=r"does not exist|neither a file|a link to a folder"):
        prepare(options(bad, tokenizer), tmp_path / "out", progress=False)


@pytest.mark.parametrize(
    "output", [".", "..", "/", "in/..", "/proc/x", "/dev/null/x", "in/good.txt", "x" * 250, "dangling"]
)
@pytest.mark.parametrize("overwrite", [False, True])
def test_an_absurd_output_is_refused_in_a_sentence(
    output: str,
    overwrite: bool,
    tokenizer: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "good.txt").write_text("good words")
    (tmp_path / "dangling").symlink_to("nowhere")
    monkeypatch.chdir(tmp_path)
    flags = ["--overwrite"] if overwrite else []
    assert main.main(["prepare", "--input", "in", "--tokenizer", str(tokenizer), "--output", output, *flags]) == 1
    said = capsys.readouterr().err.strip()
    assert said.startswith("error: ")
    assert "\n" not in said
    assert "another process" not in said
    assert sorted(os.listdir(tmp_path)) == ["dangling", "in"]
    assert os.listdir(tmp_path / "in") == ["good.txt"]


def test_absurd_numbers_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "good.txt").write_text("good words")
    for size in ("0", "256", "99999999999"):
        flags = ["--input", str(tmp_path / "good.txt"), "--output", str(tmp_path / "out"), "--train-tokenizer", size]
        assert main.main(["prepare", *flags]) == 1
        assert "train_tokenizer: expected a whole number of at " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("ending", "compress"),
    [
        ("gz", gzip.compress),
        pytest.param("bz2", bz2.compress, marks=pytest.mark.slow),
        pytest.param("xz", lzma.compress, marks=pytest.mark.slow),
    ],
)
def test_a_bomb_is_refused(ending: str, compress: Callable[[bytes], bytes], tokenizer: Path, tmp_path: Path) -> None:
    for name in (f"a.txt.{ending}", f"a.jsonl.{ending}"):
        bomb = tmp_path / name
        bomb.write_bytes(compress(bytes(65 << 20)))
        with pytest.raises(DataError, match=rf"{name} is damaged.*times its size"):
            prepare(options(bomb, tokenizer), tmp_path / "out", progress=False)


def test_a_long_word_takes_time_in_proportion(tmp_path: Path) -> None:
    def seconds(megabytes: float) -> float:
        text = string.ascii_letters * int(megabytes * 1e6 / 52)
        started = time.process_time()
        trained = train_bpe([text], 400)
        assert trained.decode(trained.encode(text[:5000])) == text[:5000]
        return time.process_time() - started

    seconds(0.1)
    # Quadratic time would be 16 times as long; this machine's share of noise is left between 4 and 10.
    assert seconds(2) < 10 * max(seconds(0.5), 0.1)
