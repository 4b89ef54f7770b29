"""Strangers' files in every verb: nothing is executed, in little time and memory, and the refusal is one sentence."""

from __future__ import annotations

import functools
import operator
from pathlib import Path

import pytest

from conftest import Workspace
from fixtures_hostile_files import KINDS, complaints, hostile, some
from fixtures_ranks import train


@pytest.fixture(scope="module")
def checkpoint(shared_workspace: Workspace) -> Path:
    return train(shared_workspace.project, "out", "run.max_iters=1").checkpoint(1)


@pytest.mark.parametrize("kind", KINDS)
def test_some_hostile_files_of_each_kind(kind: str, checkpoint: Path, tmp_path: Path) -> None:
    found = [complaints(case, tmp_path / str(n)) for n, case in enumerate(some(kind, 2, checkpoint))]
    assert not any(found), "\n".join(functools.reduce(operator.iadd, found, []))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_all_hostile_files(kind: str, checkpoint: Path, tmp_path: Path) -> None:
    found = [complaints(case, tmp_path / str(n)) for n, case in enumerate(hostile(kind, checkpoint))]
    assert not any(found), "\n".join(functools.reduce(operator.iadd, found, []))


def test_there_are_three_hundred(checkpoint: Path) -> None:
    assert sum(1 for kind in KINDS for _ in hostile(kind, checkpoint)) >= 300
