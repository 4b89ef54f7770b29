"""Checkpoints of earlier formats, written by the last releases that wrote them, resume as they did there."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from crosstrain.checkpoint.files import Reader
from crosstrain.utils.errors import CheckpointError
from fixtures_ranks import mostly_slow, train

FOLDER = Path(__file__).parent  # format_N/RUNNER: four steps of format_1/project.yaml; the log of the four after them
RANKS = {"format_1/ddp": 1, "format_1/fsdp": 2, "format_1/zero3": 2, "format_1/megatron_tp2": 2, "format_2/ddp": 1}


@pytest.mark.parametrize("written", mostly_slow(RANKS, ["format_1/ddp"]))
def test_resumes_as_in_the_release_that_wrote_it(tmp_path: Path, written: str) -> None:
    shutil.copytree(FOLDER / "format_1" / "tiny", tmp_path / "tiny")
    project = Path(shutil.copy(FOLDER / "format_1" / "project.yaml", tmp_path))
    shutil.copytree(FOLDER / written, tmp_path / "out" / "checkpoints" / "step_000004")
    version, runner = written.split("/")
    # `eager` draws the masks of attention's dropout as torch's own sdpa does on a CPU, which those releases used.
    run = train(project, "out", f"run.runner={runner}", "model.attention=eager", size=RANKS[written])
    expected = json.loads((FOLDER / version / "expected.json").read_text())[runner]
    # To the bit on one machine; another processor, or release of torch, rounds matrix products differently.
    assert [{key: row[key] for key in expected[0]} for row in run.rows] == [
        pytest.approx(row, rel=1e-4) for row in expected
    ]


@pytest.mark.parametrize("written", RANKS)
def test_is_whole(written: str, tmp_path: Path) -> None:
    copy = shutil.copytree(FOLDER / written, tmp_path / "copy")
    Reader.open(copy).verify()
    with open(min(copy.glob("training-*")), "r+b") as file:
        last = file.read() if file.seek(-1, os.SEEK_END) else b""
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last[0] ^ 1]))
    with pytest.raises(CheckpointError, match="contents do not match"):
        Reader.open(copy).verify()
