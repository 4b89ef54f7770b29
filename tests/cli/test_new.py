"""`crosstrain new`: what it writes works as written, and nothing is overwritten."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from conftest import ENVIRONMENT, ROOT
from crosstrain.cli.main import main

KINDS = ["runner", "model", "dataset", "processor", "callback"]


def new(kind: str, name: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The files that the command says it wrote."""
    assert main(["new", kind, name]) == 0
    return [line.removeprefix("wrote ") for line in capsys.readouterr().out.splitlines()[:-1]]


@pytest.mark.parametrize("kind", KINDS)
def test_a_component_and_its_test_have_the_name(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert new(kind, "my_own", capsys) == ["my_own.py", "test_my_own.py"]
    if kind == "model":
        assert new(kind, "my_model", capsys) == ["my_model.py", "test_my_model.py"]
        assert "class MyModel(Model)" in Path("my_model.py").read_text()
    source = Path("my_own.py").read_text()
    assert f'@registry.register_{kind}("my_own")\nclass MyOwn{kind.title()}(' in source
    assert "xample" not in source + Path("test_my_own.py").read_text()


def test_nothing_is_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("test_mine.py").write_text("mine")
    assert main(["new", "runner", "mine"]) == 1
    assert "test_mine.py already exists, so nothing was written" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["test_mine.py"]
    Path("crosstrain.schema.json").write_text("{}")
    assert new("project", "one", capsys) == ["one.yaml"]
    assert Path("crosstrain.schema.json").read_text() == "{}"


@pytest.mark.parametrize(("kind", "name"), [("runner", "ddp"), ("model", "My"), ("project", "../x"), ("cat", "x")])
def test_a_name_that_cannot_be_is_refused(
    kind: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["new", kind, name]) == 1
    assert capsys.readouterr().err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def run(folder: Path, *command: str, path: tuple[Path, ...] = ()) -> str:
    environment = ENVIRONMENT | {"PYTHONPATH": os.pathsep.join(map(str, [*path, ROOT / "platform"]))}
    done = subprocess.run(
        [sys.executable, "-m", *command], cwd=folder, env=environment, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_the_test_of_a_component_passes(kind: str, tmp_path: Path) -> None:
    run(tmp_path, "crosstrain", "new", kind, "my_own")
    assert " passed" in run(tmp_path, "pytest", "-p", "no:cacheprovider", "test_my_own.py")


@pytest.mark.slow
def test_a_project_trains(tmp_path: Path) -> None:
    run(tmp_path, "crosstrain", "new", "project", "mine")
    assert (tmp_path / "crosstrain.schema.json").read_bytes() == (ROOT / "projects/crosstrain.schema.json").read_bytes()
    short = ["run.max_iters=2", "run.eval_interval=null", "model.n_layer=1"]
    run(tmp_path, "crosstrain", "train", "--cfg-path", "mine.yaml", "--options", *short)
    assert (tmp_path / "output/mine/checkpoints/step_000002/config.json").exists()


@pytest.mark.slow
def test_a_package_builds_installs_and_runs(tmp_path: Path) -> None:
    run(tmp_path, "crosstrain", "new", "package", "my_own")
    workflow = yaml.safe_load((tmp_path / "my_own/.github/workflows/test.yml").read_text())
    assert workflow["jobs"]["test"]["steps"][-1] == {"run": "python -m pytest"}
    pip = ["pip", "--quiet", "--disable-pip-version-check"]
    run(tmp_path, *pip, "wheel", "--no-deps", "--no-build-isolation", "-w", "wheels", "./my_own")
    (wheel,) = (tmp_path / "wheels").glob("my_own-*.whl")
    run(tmp_path, *pip, "install", "--no-deps", "--target", "site", str(wheel))
    site = tmp_path / "site"
    listed = run(tmp_path, "crosstrain", "list", "optimizer", "my_own", path=(site,))
    assert "momentum  decay of the moving average" in listed
    tests = tmp_path / "my_own" / "tests"
    assert " passed" in run(tests, "pytest", "-p", "no:cacheprovider", "--rootdir", str(tests), path=(site,))
