"""Strangers' files in every verb: nothing is executed, in little time and memory, and the refusal is one sentence."""

from __future__ import annotations

import functools
import operator
from itertools import chain
from pathlib import Path

import pytest

from conftest import Workspace
from fixtures_hostile_files import KINDS, complaints, hostile
from fixtures_ranks import train


@pytest.fixture(scope="module")
def checkpoint(shared_workspace: Workspace) -> Path:
    return train(shared_workspace.project, "out", "run.max_iters=1").checkpoint(1)


QUICK = {
    "tokenizers that prepare": ["a text that grows twice", "pieces of nothing"],
    "tokenizers of chats": ["words that grow again"],
    "templates": ["a huge text in samples samples"],
    "folders": ["n_layer of -1", "a configuration of 900 MB"],
    "exports": ["a pickled tokenizer.model"],
    "data": ["no Parquet"],
    "configurations": ["run.toml: no TOML"],
}


@pytest.mark.parametrize("kind", QUICK)
def test_some_hostile_files(kind: str, checkpoint: Path, tmp_path: Path) -> None:
    chosen = [case for case in hostile(kind, checkpoint) if case.name in QUICK[kind]]
    assert len(chosen) == len(QUICK[kind])
    found = [complaints(case, tmp_path / str(n)) for n, case in enumerate(chosen)]
    assert not any(found), "\n".join(chain.from_iterable(found))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_all_hostile_files(kind: str, checkpoint: Path, tmp_path: Path) -> None:
    found = [complaints(case, tmp_path / str(n)) for n, case in enumerate(hostile(kind, checkpoint))]
    assert not any(found), "\n".join(functools.reduce(operator.iadd, found, []))


def test_there_are_three_hundred(checkpoint: Path) -> None:
    assert sum(1 for kind in KINDS for _ in hostile(kind, checkpoint)) >= 300
