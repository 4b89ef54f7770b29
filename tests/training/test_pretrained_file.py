"""A GGUF file as `model.pretrained` and as a tokenizer: converted once, into the cache, before the workers start."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import yaml

from conftest import Workspace
from crosstrain.cli.main import main
from crosstrain.config.pretrained_folder import as_folder, pretrained_folder
from crosstrain.config.registry import registry
from crosstrain.data.tokenizer import load_tokenizer
from crosstrain.inference.open_checkpoint import find_model
from crosstrain.utils.errors import ConfigError, DataError
from crosstrain.utils.trust import Trust, limited_to
from fixtures_gguf import write_gguf
from fixtures_ranks import train

CONVERTED = "is converted once into"


@pytest.fixture
def project(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> Workspace:
    """A project that names tiny.gguf, whose tokenizer also encodes the text."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(workspace.path / "cache"))
    write_gguf(workspace.path / "tiny.gguf")
    rng = random.Random(0)
    with open(workspace.path / "letters.jsonl", "w") as file:
        for _ in range(40):
            file.write(json.dumps({"text": "".join(rng.choices("abcdefghij", k=60))}) + "\n")
    workspace.config["model"] = {"arch": "causal_lm", "pretrained": "tiny.gguf"}
    made = {"input": "letters.jsonl", "tokenizer": "tiny.gguf"}
    text = {"name": "text", "path": "letters", "prepare": made, "tokenizer": "tiny.gguf", "seq_length": 16}
    workspace.config["datasets"] = {"letters": text | {"split": [80, 10, 10]}}
    workspace.config["run"] |= {"max_iters": 3, "init_lr": 1e-3}
    workspace.project.write_text(yaml.safe_dump(workspace.config))
    monkeypatch.chdir(workspace.path)
    return workspace


def folders(workspace: Workspace) -> list[Path]:
    return [path for path in (workspace.path / "cache" / "crosstrain" / "gguf").glob("*")]


@pytest.mark.slow
def test_a_file_trains_as_its_folder_does_and_is_converted_once(project: Workspace) -> None:
    cache = {"XDG_CACHE_HOME": str(project.path / "cache")}
    alone = project.train("alone", env=cache)
    assert alone.err.count(CONVERTED) == 1
    assert "16 are quantized (16 in Q8_0), so they are only near" in alone.out
    assert "of tiny.gguf; 16 are quantized" in (alone.folder / "log.txt").read_text()
    (folder,) = folders(project)
    made = folder.stat().st_mtime_ns

    ranks = project.train("ranks", "run.runner=fsdp", nproc=2, env=cache)
    assert CONVERTED not in ranks.err + ranks.out
    assert [path.stat().st_mtime_ns for path in folders(project)] == [made]

    assert main(["convert", "--input", "tiny.gguf", "--output", "named"]) == 0
    named = {"model.pretrained": "named", "datasets.letters.prepare": "null", "datasets.letters.tokenizer": "named"}
    by_name = train(project.project, "by_name", *(f"{key}={value}" for key, value in named.items()))
    assert alone.column("loss") == by_name.column("loss")
    assert ranks.column("loss") == pytest.approx(by_name.column("loss"), rel=2e-6)

    assert main(["export", "--checkpoint", "ranks", "--output", "exported"]) == 0
    assert load_tokenizer("exported").encode("abcde") == load_tokenizer("tiny.gguf").encode("abcde") == [11, 12, 5]


def test_a_dry_run_and_an_evaluation_take_the_file(project: Workspace, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--cfg-path", "project.yaml", "--dry-run"]) == 0
    said = capsys.readouterr()
    assert "parameters" in said.out
    assert CONVERTED in said.err
    assert [find_model("tiny.gguf", None), pretrained_folder("tiny.gguf")] == folders(project) * 2


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"no weights", "transformers cannot read it; check that it is a whole GGUF file"),
        (b"", "transformers cannot read it; check that it is a whole GGUF file"),
        (None, "no such file or folder; did you mean tiny.gguf?"),
    ],
)
@pytest.mark.parametrize("key", ["model.pretrained", "datasets.letters.tokenizer"])
def test_a_broken_file_is_one_sentence(
    project: Workspace, capsys: pytest.CaptureFixture[str], content: bytes | None, said: str, key: str
) -> None:
    if content is not None:
        (project.path / "tinny.gguf").write_bytes(content)
    for flags in ([], ["--dry-run"]):
        assert main(["train", "--cfg-path", "project.yaml", *flags, "--options", f"{key}=tinny.gguf"]) == 1
        *notes, error = capsys.readouterr().err.splitlines()
        assert not [note for note in notes if note.startswith("error")]
        assert "tinny.gguf" in error
        assert said in error
    assert not (project.path / "out").exists()


def test_a_changed_file_is_converted_again(project: Workspace) -> None:
    first = as_folder(Path("tiny.gguf"))
    assert as_folder(project.path / "tiny.gguf") == first
    write_gguf(project.path / "tiny.gguf")
    assert as_folder(Path("tiny.gguf")) != first


def test_files_of_others_need_trust(project: Workspace) -> None:
    with limited_to(Trust.NOTHING), pytest.raises(ConfigError, match="add --trust-data"):
        load_tokenizer("tiny.gguf")
    assert folders(project) == []


def test_a_converter_is_a_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry._objects, ("converter", "toy"), lambda file: file.with_suffix(""))
    (tmp_path / "model.toy").write_text("toy")
    assert as_folder(tmp_path / "model.toy") == tmp_path / "model"
    (tmp_path / "folder.toy").mkdir()
    assert as_folder(tmp_path / "folder.toy") == tmp_path / "folder.toy"
    with pytest.raises(DataError, match=r"modl\.toy: no such file or folder; did you mean .*model\.toy"):
        as_folder(tmp_path / "modl.toy")
