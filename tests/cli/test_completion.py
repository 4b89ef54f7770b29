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


def test_a_shell_completes_verbs_kinds_and_names(tmp_path: Path) -> None:
    expected = {
        "crosstrain exp": {"export"},
        "crosstrain new pro": {"project"},
        "crosstrain list runner meg": {"megatron", "megatron_tp2", "megatron_pp4"},
    }
    for (line, words), found in zip(expected.items(), completed(tmp_path, *expected), strict=True):
        assert words <= set(found), line
        assert all(word.startswith(line.split(" ")[-1].rpartition("=")[2]) for word in found), line
