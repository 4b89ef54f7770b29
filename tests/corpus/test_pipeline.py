"""A recipe from input to tokens: what is kept and why, the same whatever interrupts it and however many work."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from crosstrain_plugins.builtin.commands.prepare import reader
from crosstrain_plugins.builtin.commands.prepare.options import PrepareOptions
from crosstrain_plugins.builtin.commands.prepare.prepare import prepare
from crosstrain_plugins.builtin.commands.prepare.stages import FilterStage
from crosstrain_plugins.builtin.datasets.prepared import Summary

from conftest import ENVIRONMENT, ROOT, TEXTS, json_lines
from crosstrain.cli.main import main
from crosstrain.config.schema import Checker
from crosstrain.utils.errors import DataError

WORDS = [f"{a}{b}{c}" for a in ("ba", "de", "ki", "lo") for b in ("n", "r", "s", "t") for c in ("a", "e", "o")]


def long_texts(count: int, start: int = 0) -> list[str]:
    """Texts `start` to `count` of a made-up language."""
    return [" ".join([f"text {i}:", *random.Random(i).choices(WORDS, k=40)]) for i in range(start, count)]


def content(folder: Path) -> dict[str, bytes]:
    """Every file of a prepared folder."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def options(source: Path, **more: Any) -> PrepareOptions:
    return PrepareOptions(**{"input": str(source), "train_tokenizer": 300, **more})


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "crosstrain", "prepare", *arguments]


def environment() -> dict[str, str]:
    return ENVIRONMENT | {"PYTHONPATH": str(ROOT / "platform")}


def write_recipe(folder: Path, source: Path, **more: Any) -> Path:
    recipe = {"input": [str(source)], "output": str(folder / "out"), "train_tokenizer": 300, **more}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe, sort_keys=False))
    return folder / "recipe.yaml"


# ---- what is kept, and why


def test_an_input_that_gives_no_document_says_why(tmp_path: Path) -> None:
    def complaint(name: str, text: str, **more: Any) -> str:
        (tmp_path / name).write_text(text)
        good = json_lines(tmp_path / "good.jsonl", long_texts(3))
        with pytest.raises(DataError) as error:
            prepare(
                PrepareOptions(input=[str(good), str(tmp_path / name)], train_tokenizer=300, **more),
                tmp_path / "out",
                False,
            )
        return str(error.value)

    assert "empty.jsonl holds no document: it is empty" in complaint("empty.jsonl", "")
    assert "blank.txt holds no document: all its documents are empty or white space" in complaint("blank.txt", " \n")


def test_a_report_says_what_became_of_every_document(tmp_path: Path) -> None:
    texts = [*long_texts(20), "buy now\n" * 30, "tiny", long_texts(1)[0], "schÃ¶n " + long_texts(21, 20)[0]]
    source = json_lines(tmp_path / "t.jsonl", texts)
    clean = ["unicode", "repetition", {"name": "document_length", "min_tokens": 8}]
    recipe = write_recipe(tmp_path, source, clean=clean, dedup={"exact": True})
    assert main(["prepare", "--cfg-path", str(recipe)]) == 0
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    found = report["inputs"][str(source)]
    assert (found["documents"], found["blank"], found["bytes"]) == (24, 0, sum(len(t.encode()) for t in texts))
    assert {name: step["documents"] for name, step in found["dropped"].items()} == {"repetition": 1}
    assert found["dropped"]["repetition"]["examples"][0]["source"] == f"{source}:21"
    assert report["repeated"]["exact"]["documents"] == 1
    assert report["repeated"]["exact"]["examples"][0]["source"] == f"{source}:23"
    assert report["repeated"]["exact"]["examples"][0]["why"].startswith(f"equal to {source}:1: text 0: ")
    assert report["tokenized"]["dropped"]["document_length"]["documents"] == 1
    assert report["tokenized"]["dropped"]["document_length"]["examples"][0]["text"] == "tiny"
    assert report["tokenized"]["dropped"]["document_length"]["examples"][0]["source"] == f"{source}:22"
    summary = Summary.read(tmp_path / "out")
    assert (summary.documents, summary.dropped) == (21, 3)
    assert sum(row["documents"] for row in report["lengths"]["tokens"]) == 21


def test_flags_override_a_recipe_and_mistakes_name_their_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], tokenizer: Path
) -> None:
    recipe = write_recipe(tmp_path, json_lines(tmp_path / "t.jsonl", TEXTS))
    json_lines(tmp_path / "t.jsonl", TEXTS, key="body")
    other = str(tmp_path / "other")
    assert main(["prepare", "--cfg-path", str(recipe), "--output", other, "--options", "text_key=body"]) == 0
    assert Summary.read(Path(other)).options["text_key"] == "body"
    assert not (tmp_path / "out").exists()
    write_recipe(tmp_path, tmp_path / "t.jsonl", clean=[{"name": "repetition", "line": 1.0}])
    assert main(["prepare", "--cfg-path", str(recipe)]) == 1
    assert "recipe.yaml:7: clean.0.line: unknown key; did you mean clean.0.lines?" in capsys.readouterr().err


# ---- the same whatever happens


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of two files that make many tasks."""
    monkeypatch.setattr(reader, "TASK_BYTES", 4000)
    (tmp_path / "text").mkdir()
    json_lines(tmp_path / "text" / "a.jsonl", long_texts(120))
    json_lines(tmp_path / "text" / "b.jsonl", long_texts(200, 60))
    return tmp_path / "text"


NEAR = {"exact": True, "near": {"threshold": 0.7, "shingle": 3}}


def recipe_options(source: Path, **more: Any) -> PrepareOptions:
    tree = {"input": str(source), "train_tokenizer": 300, "clean": ["unicode"], "dedup": NEAR, **more}
    return Checker(lambda key: ".".join(key)).dataclass(PrepareOptions, tree, ())


@pytest.mark.slow
def test_any_number_of_workers_gives_the_same_files(corpus: Path, tmp_path: Path) -> None:
    alone = prepare(recipe_options(corpus), tmp_path / "one", False)
    prepare(recipe_options(corpus, workers=2), tmp_path / "two", False)
    assert content(tmp_path / "one") == content(tmp_path / "two")
    assert alone.documents <= 200


def test_what_is_finished_is_not_done_again(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare(recipe_options(corpus), tmp_path / "whole", False)
    line = (corpus / "b.jsonl").read_text().splitlines()[-1]
    broken = (corpus / "b.jsonl").read_text().replace(line, "{broken")
    (corpus / "b.jsonl").write_text(broken)
    with pytest.raises(DataError, match=r"b\.jsonl:140 is not a JSON object"):
        prepare(recipe_options(corpus), tmp_path / "out", False)
    done = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out.partial" / "clean").glob("*.json")}
    assert len(done) > 5
    (corpus / "b.jsonl").write_text(broken.replace("{broken", line))
    tasks = {"met": 0, "read": 0}

    def counted(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            tasks[name] += 1
            return method(*arguments)

        return call

    monkeypatch.setattr(FilterStage, "__call__", counted("met", FilterStage.__call__))
    monkeypatch.setattr(reader.FileReader, "read", counted("read", reader.FileReader.read))
    prepare(recipe_options(corpus), tmp_path / "out", False)
    assert tasks["met"] - tasks["read"] >= 3  # those of a.jsonl were there; b.jsonl is another file now
    assert content(tmp_path / "whole") == content(tmp_path / "out")
    assert not (tmp_path / "out.partial").exists()


@pytest.mark.slow
@pytest.mark.parametrize("wait_for", ["clean/*.json", "tokens-*/*.json"])
def test_killed_in_any_stage_it_goes_on_to_the_same_result(tmp_path: Path, wait_for: str) -> None:
    source = json_lines(tmp_path / "t.jsonl", [f"{text} " * 40 + str(i) for i, text in enumerate(long_texts(8_000))])
    recipe = write_recipe(tmp_path, source, dedup=NEAR, workers=2)
    for name in ("whole", "killed"):
        process = subprocess.Popen(
            command("--cfg-path", str(recipe), "--output", str(tmp_path / name)),
            env=environment(),
            start_new_session=True,
            stderr=subprocess.DEVNULL,
        )
        if name == "killed":
            while not list((tmp_path / "killed.partial").glob(wait_for)):
                assert process.poll() is None
                time.sleep(0.01)
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    kept = {path: path.stat().st_mtime_ns for path in (tmp_path / "killed.partial").glob("clean/*.json")}
    assert kept
    again = subprocess.run(command("--cfg-path", str(recipe), "--output", str(tmp_path / "killed")), env=environment())
    assert again.returncode == 0
    assert content(tmp_path / "whole") == content(tmp_path / "killed")


def test_a_full_disk_is_named_and_what_is_finished_stays(corpus: Path, tmp_path: Path) -> None:
    prepare(recipe_options(corpus, workers=1), tmp_path / "whole", False)
    largest = max(path.stat().st_size for path in (tmp_path / "whole").rglob("*"))
    done = subprocess.run(
        [sys.executable, "-c", _LIMITED, str(corpus), str(tmp_path / "out"), str(largest - 1)],
        env=environment() | {"PYTHONPATH": f"{ROOT / 'platform'}:{ROOT / 'tests'}:{Path(__file__).parent}"},
        capture_output=True,
        text=True,
    )
    assert "there is no space to write" in done.stdout, done.stdout + done.stderr
    assert list((tmp_path / "out.partial" / "clean").glob("*.json"))
    prepare(recipe_options(corpus, workers=1), tmp_path / "out", False)
    assert content(tmp_path / "whole") == content(tmp_path / "out")


_LIMITED = """
import resource, sys
from pathlib import Path
from crosstrain_plugins.builtin.commands.prepare import reader
from crosstrain.utils.errors import DataError
from test_pipeline import prepare, recipe_options
reader.TASK_BYTES = 4000
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[3]),) * 2)
try:
    prepare(recipe_options(Path(sys.argv[1]), workers=1), Path(sys.argv[2]), False)
except DataError as error:
    print(error)
"""


# ---- whole datasets


def test_inspect_shows_counts_and_a_document(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prepare(options(json_lines(tmp_path / "t.jsonl", TEXTS)), tmp_path / "out", False)
    assert main(["prepare", "inspect", str(tmp_path / "out"), "--document", "1"]) == 0
    shown = capsys.readouterr().out
    assert "3 documents in 3 sequences" in shown
    assert TEXTS[1] in shown
    assert main(["prepare", "inspect", str(tmp_path / "out"), "--document", "3"]) == 1
    assert "has no document 3; expected 0 to 2" in capsys.readouterr().err


def test_a_replaced_tokenizer_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prepare(options(json_lines(tmp_path / "t.jsonl", TEXTS)), tmp_path / "a", False)
    path = tmp_path / "a" / "tokenizer" / "tokenizer.json"
    path.write_text(path.read_text().replace('"version"', '"Version"', 1))
    assert main(["prepare", "inspect", str(tmp_path / "a")]) == 1
    assert "is not the tokenizer that encoded the tokens beside it" in capsys.readouterr().err


@pytest.mark.slow
def test_workers_end_with_the_one_that_leads(tmp_path: Path) -> None:
    program = (
        "import os, sys, time\nfrom test_pipeline import Sleep\n"
        "from crosstrain_plugins.builtin.commands.prepare.pool import run_stage\n"
        "if __name__ == '__main__':\n"
        "    for pid in run_stage(Sleep(), [0, 0, 0, 0, 60, 60], 2):\n"
        "        print(pid, flush=True)\n"
    )
    (tmp_path / "lead.py").write_text(program)
    path = f"{ROOT / 'platform'}:{ROOT / 'tests'}:{Path(__file__).parent}"
    lead = subprocess.Popen(
        [sys.executable, str(tmp_path / "lead.py")],
        env=environment() | {"PYTHONPATH": path},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert lead.stdout is not None
    workers = {int(lead.stdout.readline()) for _ in range(4)}
    lead.kill()
    lead.wait()
    deadline = time.monotonic() + 20
    while any(Path(f"/proc/{pid}").exists() for pid in workers):
        assert time.monotonic() < deadline
        time.sleep(0.05)


class Sleep:
    """Waits, and says who did."""

    def __call__(self, item: int) -> int:
        time.sleep(item)
        return os.getpid()
