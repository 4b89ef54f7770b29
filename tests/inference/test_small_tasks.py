"""The tasks of configs/tasks: rows that are the same everywhere, one right choice, chance for random weights."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from typing import Any

import pytest

from conftest import ROOT, Workspace
from fixtures_ranks import train

FILE = ROOT / "configs" / "tasks" / "rows.py"
TASKS = ["arithmetic", "copying", "brackets", "recall", "cloze"]


@pytest.fixture(scope="module")
def make() -> Callable[..., list[dict[str, Any]]]:
    pytest.importorskip("datasets")
    spec = importlib.util.spec_from_file_location("rows", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return lambda name, **options: list(getattr(module, name)(**options)["test"])


@pytest.mark.parametrize("task", TASKS)
def test_rows_are_the_same_each_time_and_have_distinct_choices(make: Callable[..., Any], task: str) -> None:
    rows = make(task)
    assert rows == make(task)
    assert len(rows) == 200
    for row in rows:
        assert len({*row["choices"]}) == len(row["choices"]) == (3 if task == "brackets" else 4)
        assert 0 <= row["answer"] < len(row["choices"])
    places = [sum(row["answer"] == place for row in rows) for place in range(3)]
    assert min(places) > 20, "the right choice is not always at one place"


def right(row: dict[str, Any]) -> str:
    return row["choices"][row["answer"]]


def test_the_answers_are_right(make: Callable[..., Any]) -> None:
    for row in make("arithmetic"):
        a, b = map(int, re.findall(r"\d+", row["text"].splitlines()[-1]))
        assert right(row) == str(a + b)
    for row in make("copying"):
        assert row["text"].splitlines()[-2] == f"in: {right(row)}"
    for row in make("brackets"):
        text = (row["text"] + " " + right(row)).replace(" ", "")
        while (shorter := re.sub(r"\(\)|\[\]|\{\}", "", text)) != text:
            text = shorter
        assert set(text) <= set("([{"), "only opening brackets are left"
    for row in make("recall", facts=16):
        name = row["text"].rsplit(" ", 2)[1]
        assert re.findall(rf"code of {name} is (\d+)\.", row["text"]) == [right(row)]
        assert row["text"].count("The code of") == 17


@pytest.mark.skipif(importlib.util.find_spec("lm_eval") is None, reason="needs lm_eval")
@pytest.mark.slow
def test_a_callback_runs_them_at_each_validation(workspace: Workspace) -> None:
    callback = "run.callbacks=[{name: eval_tasks, tasks: [small_brackets, small_recall_4], max_samples: 60}]"
    options = ("run.eval_interval=10", "run.eval_iters=1", "model.n_positions=256", callback)
    one = train(workspace.project, "one", *options)
    names = ("small_brackets/acc", "small_recall_4/acc")
    rows = [row for row in one.rows if "val_loss" in row]
    assert [row["step"] for row in rows] == [10, 20]
    for row in rows:
        for name in names:
            assert 0.05 < row[name] < 0.7, "near chance"
    two = train(workspace.project, "two", *options, "run.runner=fsdp", size=2)
    for mine, other in zip(rows, (row for row in two.rows if "val_loss" in row), strict=True):
        assert [mine[name] for name in names] == [other[name] for name in names]


def test_task_files_name_the_rows() -> None:
    texts = [path.read_text() for path in (ROOT / "configs" / "tasks").glob("small_*.yaml")]
    assert len(texts) == 6
    assert {re.search(r"rows\.(\w+)", text)[1] for text in texts} == {*TASKS}  # type: ignore[index]
