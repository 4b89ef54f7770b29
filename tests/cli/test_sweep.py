"""`crosstrain sweep`: many short runs, ranked; a killed sweep goes on where it was."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from crosstrain_plugins.builtin.commands.sweep.sweep import Choices, Range, read_space

from conftest import ENVIRONMENT, Workspace
from crosstrain import UserError

SEARCH = ("--search", "run.init_lr=1e-4..1e-2:log", "model.dropout=0,0.1")
RUN = (
    "--options",
    "run.max_iters=8",
    "run.eval_interval=4",
    "run.eval_iters=1",
    "run.save_interval=2",
    "run.threads=1",
)


def sweep(workspace: Workspace, *flags: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "crosstrain", "sweep", "--cfg-path", str(workspace.project)]
    return subprocess.Popen(
        [*command, "--output", str(workspace.path / "sweep"), *flags, *RUN],
        env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=workspace.path,
    )  # fmt: skip


def ranking(said: str) -> list[tuple[str, float]]:
    return [(name, float(value)) for name, value in re.findall(r"^(run_\d+) +([\d.]+) ", said, re.MULTILINE)]


def test_ranges_and_choices() -> None:
    space = read_space(["a=1e-4..1e-2:log", "b=2..8", "c=gelu,relu", "d=[1, 2],[3]", "e=0.5..2"])
    assert space == {
        "a": Range(1e-4, 1e-2, True), "b": Range(2, 8, False), "c": Choices(("gelu", "relu")),
        "d": Choices(("[1, 2]", "[3]")), "e": Range(0.5, 2.0, False),
    }  # fmt: skip


class _Middle:
    """A trial that takes the middle of every range, and the last choice."""

    def suggest_float(self, _: str, low: float, high: float, log: bool) -> float:
        return (low * high) ** 0.5 if log else (low + high) / 2

    def suggest_int(self, _: str, low: int, high: int, log: bool) -> int:
        return (low + high) // 2

    def suggest_categorical(self, _: str, values: Sequence[str]) -> str:
        return values[-1]


def test_drawn_values_are_written_as_in_options() -> None:
    trial: Any = _Middle()
    assert Range(1e-4, 1e-2, True).draw(trial, "a") == "0.001"
    assert Range(2, 8, False).draw(trial, "b") == "5"
    assert Choices(("[1, 2]", "[3]")).draw(trial, "d") == "[3]"


@pytest.mark.parametrize("text", ["run.seed", "run.seed=", "run.seed=3", "=1,2", "a=5..2", "a=0..1:log", "a=[1,2"])
def test_wrong_searches_are_refused(text: str) -> None:
    with pytest.raises(UserError, match="--search: "):
        read_space([text])


def test_every_end_of_a_search_is_checked_before_the_first_run(workspace: Workspace) -> None:
    process = sweep(workspace, "--search", "model.dropout=0,2.5")
    said, _ = process.communicate(timeout=100)
    assert process.returncode == 1
    assert "model.dropout" in said
    assert not (workspace.path / "sweep").exists()


@pytest.mark.slow
def test_a_killed_sweep_continues_its_runs(workspace: Workspace) -> None:
    flags = ("--trials", "4", "--workers", "2", *SEARCH)
    process, folder = sweep(workspace, *flags), workspace.path / "sweep"
    deadline = time.monotonic() + 200
    while not (folder / "run_000" / "checkpoints").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGKILL)
    process.wait()
    psutil.wait_procs(children, 60)
    process = sweep(workspace, *flags)
    said, _ = process.communicate(timeout=400)
    assert process.returncode == 0, said
    found = ranking(said)
    assert sorted(name for name, _ in found) == ["run_000", "run_001", "run_002", "run_003"]
    assert [value for _, value in found] == sorted(value for _, value in found)
    assert (folder / "sweep.png").stat().st_size > 5000
    assert best_of(folder / found[0][0]) == pytest.approx(found[0][1], rel=1e-4)
    other = sweep(workspace, "--trials", "4", "--search", "model.dropout=0,0.2")
    said, _ = other.communicate(timeout=100)
    assert other.returncode == 1
    assert "is a sweep with a different search" in said


def best_of(run: Path) -> float:
    found = re.findall(r'"val_loss": ([\d.]+)', (run / "metrics.jsonl").read_text())
    return min(map(float, found))
