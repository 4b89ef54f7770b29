"""The commands that a run names when it ends: each works as it stands, from where the run was started."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from conftest import ENVIRONMENT, ROOT, Workspace
from crosstrain.checkpoint import folders
from crosstrain.inference.open_checkpoint import open_on_workers
from crosstrain.utils.errors import ConfigError
from crosstrain.utils.program import command
from fixtures_chat import SHAPES, write_tokenizer
from fixtures_processes import train_as_user
from fixtures_ranks import train
from fixtures_vision import shapes, write_project


@pytest.mark.parametrize("installed", [True, False])
def test_a_command_is_one_that_this_environment_has(
    installed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("python", "crosstrain")[: 1 + installed]:
        (tmp_path / name).touch(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    uninstalled = ["env", f"PYTHONPATH={ROOT / 'platform'}", "python", "-m", "crosstrain"]
    program = ["crosstrain"] if installed else uninstalled
    assert shlex.split(command("serve", "--output", "a folder")) == [*program, "serve", "--output", "a folder"]
    monkeypatch.setenv("PATH", "")  # nothing is found by its name
    assert f"{tmp_path}/" in command("serve")


def suggested(out: str) -> dict[str, list[str]]:
    """The commands that a run names at its end, by title."""
    lines = out.partition("open next:\n")[2].splitlines()
    found = (re.match(r"  (\w+ it) +(.+)", line) for line in lines)
    return {match[1]: shlex.split(match[2]) for match in found if match}


FAILS = """
from crosstrain import Callback, registry


@registry.register_callback("fails")
class Fails(Callback):
    def after_step(self, metrics):
        if self.trainer.state.step == 3:
            raise LookupError("nothing is there")
"""


@pytest.mark.parametrize("nproc", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_the_error_that_ends_a_run_is_the_last_line_of_its_log(workspace: Workspace, nproc: int) -> None:
    """After all that was still being written."""
    (workspace.path / "fails.py").write_text(FAILS)
    options = ("run.plugins=[fails.py]", "run.callbacks=[fails]", "run.save_interval=1")
    run = train_as_user(workspace, "out", *options, nproc=nproc, fails=True)
    last = (run.folder / "log.txt").read_text().splitlines()[-1]
    assert "error: " in last
    assert "LookupError: nothing is there" in last
    assert folders.steps(run.folder / "checkpoints") == [1, 2]


def test_the_closing_lines_fit_the_run(workspace: Workspace) -> None:
    run = train(workspace.project, "a run", "run.max_iters=1")
    named = suggested((run.folder / "log.txt").read_text())
    assert list(named) == ["try it", "serve it", "export it"]
    assert named["try it"][-3:] == ["--checkpoint", str(run.folder), "--interactive"]
    assert named["export it"][-2:] == ["--output", str(run.folder / "export")]


def test_a_layout_for_more_ranks_gives_way_to_one_process(
    workspace: Workspace, capsys: pytest.CaptureFixture[str]
) -> None:
    run = train(workspace.project, "out", "run.max_iters=1")
    settings = yaml.safe_load((run.folder / "config.yaml").read_text())
    settings["run"]["runner"] = {"name": "megatron", "tensor_parallel": 2, "pipeline_parallel": 2}
    (run.folder / "config.yaml").write_text(yaml.safe_dump(settings))
    given = run.checkpoint(1), str(run.folder / "config.yaml")
    config, how = open_on_workers(*given, [], False, None)
    assert (config.run.runner.name, how.world_size) == ("ddp", 1)
    (note,) = capsys.readouterr().err.splitlines()
    assert note.startswith("note: ")
    assert note.endswith("; using one process with plain torch instead")
    for chosen, workers in (["run.runner.pipeline_parallel=1"], None), ([], 1), ([], 3):
        with pytest.raises(ConfigError, match="set --nproc-per-node N, or choose a different runner"):
            open_on_workers(*given, chosen, False, workers)


REGRESSION = """
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from crosstrain import Dataset, Model, registry


@registry.register_dataset("line")
class Line(Dataset):
    def __len__(self) -> int:
        return 64

    def get(self, index, rng):
        x = rng.normal(size=4).astype(np.float32)
        return {"x": x, "labels": x.sum(keepdims=True)}


@registry.register_model("mlp")
class Perceptron(Model):
    def __init__(self, options) -> None:
        super().__init__(options)
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return ((self.layers(x) - labels) ** 2).sum()

    def blocks(self):
        return list(self.layers)
"""


def text(workspace: Workspace) -> list[str]:
    return []


def tensor_parallel(workspace: Workspace) -> list[str]:
    return ["run.runner=megatron_tp2"]


def chat(workspace: Workspace) -> list[str]:
    write_tokenizer(workspace.path / "tokenizer", SHAPES["chatml"].template)
    turns = [{"role": "user", "content": "red"}, {"role": "assistant", "content": "hello"}]
    (workspace.path / "chats.jsonl").write_text((json.dumps({"messages": turns}) + "\n") * 40)
    workspace.config["model"] |= {"vocab_size": 512, "n_positions": 64}
    data = {"name": "chat", "path": "chats.jsonl", "tokenizer": "tokenizer", "seq_length": 64}
    workspace.config["datasets"] = {"chats": data}
    workspace.project.write_text(yaml.safe_dump(workspace.config))
    return []


def images(workspace: Workspace) -> list[str]:
    write_project(workspace.project, shapes(workspace.path))
    return []


def regression(workspace: Workspace) -> list[str]:
    (workspace.path / "mine.py").write_text(REGRESSION)
    workspace.config |= {"model": {"arch": "mlp"}, "datasets": {"line": {"name": "line"}}}
    workspace.config["run"]["plugins"] = ["mine.py"]
    workspace.project.write_text(yaml.safe_dump(workspace.config))
    return []


SHELL = ENVIRONMENT | {"PYTHONPATH": str(ROOT / "platform")}


@pytest.fixture(scope="module", params=["checkout", "installed"])
def program(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The beginning of a command that trains: of a checkout that is not installed, or of a wheel that is."""
    here = tmp_path_factory.mktemp("environment")
    (here / "bin").mkdir()
    (here / "bin" / "python").symlink_to(sys.executable)
    (here / "lib").symlink_to(Path(sys.prefix, "lib"))
    (here / "pyvenv.cfg").write_text(Path(sys.prefix, "pyvenv.cfg").read_text())
    if request.param == "checkout":
        return [str(here / "bin" / "python"), str(ROOT / "train.py")]
    script = here / "bin" / "crosstrain"
    script.write_text(f"#!{here}/bin/python\n" + (ROOT / "platform" / "crosstrain" / "__main__.py").read_text())
    script.chmod(0o755)
    return [str(script), "train"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "ranks", "titles"),
    [
        (text, 1, "try serve export"), (tensor_parallel, 2, "try serve export"), (chat, 1, "try serve export"),
        (images, 1, "try serve export"), (regression, 1, "evaluate export"),
    ],
)  # fmt: skip
def test_every_command_that_a_run_ends_with_works(
    workspace: Workspace, kind: Callable[[Workspace], list[str]], ranks: int, titles: str, program: list[str]
) -> None:
    options = [*kind(workspace), "run.output_dir=it's a run", "run.max_iters=2"]
    arguments = ["--cfg-path", str(workspace.project), "--nproc-per-node", str(ranks), "--options", *options]
    out = said(workspace, [*program, *arguments])
    named = suggested(out)
    assert list(named) == [f"{title} it" for title in titles.split()]
    for title, words in named.items():
        assert "it's a run" in words
        if title != "serve it":
            answered = said(workspace, words, "red\nstop\n")
            assert ("> red" in answered) == (title == "try it")
            continue
        server = subprocess.Popen(
            [*words, "--port", "0"],
            cwd=workspace.path,
            env=SHELL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert server.stdout is not None
        assert server.stdout.readline().startswith("loading it's a run")
        rest = iter(server.stdout.readline, "")
        assert any(line.startswith("serving") for line in rest)
        server.send_signal(signal.SIGINT)
        assert server.wait(30) == 0
    assert (workspace.path / "it's a run" / "export" / "model.safetensors").exists()


def said(workspace: Workspace, words: list[str], typed: str = "") -> str:
    done = subprocess.run(
        words, cwd=workspace.path, env=SHELL, input=typed, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, f"{words}\n{done.stdout}\n{done.stderr}"
    assert not re.search("error|warn|deprecat", done.stdout + done.stderr, re.IGNORECASE), done.stderr
    return done.stdout
