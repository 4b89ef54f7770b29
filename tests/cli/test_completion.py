"""Completion in a real bash, as `eval "$(register-python-argcomplete crosstrain)"` sets it up."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import ENVIRONMENT, ROOT

SCRIPT = """
eval "$(python -m argcomplete.scripts.register_python_argcomplete crosstrain)"
COMP_LINE="$1" COMP_POINT=${#1} COMP_TYPE=9
_python_argcomplete crosstrain
printf '%s\\n' "${COMPREPLY[@]}"
"""
QUICKSTART = "crosstrain train --cfg-path projects/quickstart.yaml --options "


def completed(line: str, folder: Path) -> list[str]:
    """The words that bash offers behind `line`; behind = the shell has the part before it already."""
    program = folder / "crosstrain"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m crosstrain "$@"\n')
    program.chmod(0o755)
    path = os.pathsep.join([str(folder), str(Path(sys.executable).parent), ENVIRONMENT["PATH"]])
    environment = ENVIRONMENT | {"PATH": path, "PYTHONPATH": str(ROOT / "platform")}
    done = subprocess.run(
        ["bash", "-c", SCRIPT, "bash", line], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout.split()


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("crosstrain exp", {"export"}),
        ("crosstrain list runner meg", {"megatron", "megatron_tp2", "megatron_pp4"}),
        ("crosstrain new pro", {"project"}),
        (QUICKSTART, {"model.", "datasets.", "run."}),
        (QUICKSTART + "model.n_", {"model.n_layer=", "model.n_embd="}),
        (QUICKSTART + "datasets.", {"datasets.stdlib.", "datasets.stdlib="}),
        (QUICKSTART + "run.gradient_checkpointing=", {"none", "full", "selective", "offload"}),
    ],
)
def test_a_shell_completes(line: str, words: set[str], tmp_path: Path) -> None:
    found = completed(line, tmp_path)
    assert words <= set(found)
    assert all(word.startswith(line.split(" ")[-1].rpartition("=")[2]) for word in found)


def test_keys_of_the_runner_that_the_project_names_complete(tmp_path: Path) -> None:
    project = tmp_path / "mine.yaml"
    project.write_text("run: {runner: zero3}\n")
    keys = completed(f"crosstrain plan --cfg-path {project} --options run.runner.stage3", tmp_path)
    assert "run.runner.stage3_prefetch_bucket_size=" in keys
    (tmp_path / "crosstrain.schema.json").write_text('{"properties": {"mine": {"enum": ["yes"]}}}')
    assert completed(f"crosstrain plan --cfg-path {project} --options mi", tmp_path) == []
