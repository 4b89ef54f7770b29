"""Completion in a real bash, as `eval "$(register-python-argcomplete crosstrain)"` sets it up."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from conftest import ENVIRONMENT, ROOT

SCRIPT = """
eval "$(python -m argcomplete.scripts.register_python_argcomplete crosstrain)"
for line in "$@"; do
  COMP_LINE="$line" COMP_POINT=${#line} COMP_TYPE=9 COMPREPLY=()
  _python_argcomplete crosstrain
  echo "${COMPREPLY[@]}"
done
"""
QUICKSTART = "crosstrain train --cfg-path projects/quickstart.yaml --options "


def completed(folder: Path, *lines: str) -> list[list[str]]:
    """The words that bash offers behind each line; behind = the shell has the part before it already."""
    program = folder / "crosstrain"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m crosstrain "$@"\n')
    program.chmod(0o755)
    path = os.pathsep.join([str(folder), str(Path(sys.executable).parent), ENVIRONMENT["PATH"]])
    environment = ENVIRONMENT | {"PATH": path, "PYTHONPATH": str(ROOT / "platform")}
    done = subprocess.run(
        ["bash", "-c", SCRIPT, "bash", *lines], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    return [line.split() for line in done.stdout.splitlines()]


def test_a_shell_completes_verbs_names_keys_and_values(tmp_path: Path) -> None:
    expected = {
        "crosstrain exp": {"export"},
        "crosstrain new pro": {"project"},
        "crosstrain list runner meg": {"megatron", "megatron_tp2", "megatron_pp4"},
        QUICKSTART: {"model.", "datasets.", "run."},
        QUICKSTART + "model.n_": {"model.n_layer=", "model.n_embd="},
        QUICKSTART + "datasets.": {"datasets.stdlib.", "datasets.stdlib="},
        QUICKSTART + "run.gradient_checkpointing=": {"none", "full", "selective", "offload"},
    }
    for (line, words), found in zip(expected.items(), completed(tmp_path, *expected), strict=True):
        assert words <= set(found), line
        assert all(word.startswith(line.split(" ")[-1].rpartition("=")[2]) for word in found), line


def test_keys_are_those_of_the_project_and_of_the_schema_beside_it(tmp_path: Path) -> None:
    project = tmp_path / "mine.yaml"
    project.write_text("run: {runner: zero3}\n")
    (keys,) = completed(tmp_path, f"crosstrain plan --cfg-path {project} --options run.runner.stage3")
    assert "run.runner.stage3_prefetch_bucket_size=" in keys
    (tmp_path / "crosstrain.schema.json").write_text('{"properties": {"mine": {"enum": ["yes"]}}}')
    assert completed(tmp_path, f"crosstrain plan --cfg-path {project} --options run.") == [[]]
