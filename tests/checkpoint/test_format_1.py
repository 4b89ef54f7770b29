"""Checkpoints of the first format, written by the release before the second one, resume as they did there."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from crosstrain.checkpoint.files import Reader
from fixtures_ranks import mostly_slow, train

WRITTEN = Path(__file__).parent / "format_1"  # four steps of project.yaml, and the log of the four after them
RANKS = {"ddp": 1, "fsdp": 2, "zero3": 2, "megatron_tp2": 2}


@pytest.mark.parametrize("runner", mostly_slow(RANKS, ["ddp", "megatron_tp2"]))
def test_resumes_as_in_the_release_that_wrote_it(tmp_path: Path, runner: str) -> None:
    shutil.copytree(WRITTEN / "tiny", tmp_path / "tiny")
    project = Path(shutil.copy(WRITTEN / "project.yaml", tmp_path))
    shutil.copytree(WRITTEN / runner, tmp_path / "out" / "checkpoints" / "step_000004")
    run = train(project, "out", f"run.runner={runner}", size=RANKS[runner])
    expected = json.loads((WRITTEN / "expected.json").read_text())[runner]
    # To the bit on one machine; another processor, or release of torch, rounds matrix products differently.
    assert [{key: row[key] for key in expected[0]} for row in run.rows] == [
        pytest.approx(row, rel=1e-4) for row in expected
    ]


@pytest.mark.parametrize("runner", RANKS)
def test_is_whole(runner: str) -> None:
    Reader.open(WRITTEN / runner).verify()
