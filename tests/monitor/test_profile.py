"""Profiles of a window of steps: what is written, and that looking changes nothing."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from conftest import Run, Workspace
from crosstrain.config.load import load_config
from crosstrain.utils.errors import ConfigError
from fixtures_ranks import train

WINDOW = "run.profile={steps: [7, 9]}"


def steps_in(trace: Path) -> list[str]:
    events = json.loads(trace.read_text())["traceEvents"]
    return sorted({e["name"] for e in events if e.get("name", "").startswith("ProfilerStep#")})


def operators(trace: Path) -> set[str]:
    return {e["name"] for e in json.loads(trace.read_text())["traceEvents"] if e.get("cat") == "cpu_op"}


@pytest.fixture(scope="module")
def profiled(shared_workspace: Workspace) -> Run:
    return train(shared_workspace.project, "profiled", WINDOW, "run.max_iters=10")


@pytest.mark.slow
def test_a_window_leaves_a_trace_and_a_table(profiled: Run) -> None:
    [folder] = (profiled.folder / "profile").iterdir()
    assert folder.name == "steps_000007-000009"
    trace = folder / "rank0.pt.trace.json"
    assert steps_in(trace) == [f"ProfilerStep#{n}" for n in (7, 8, 9)]
    assert {"aten::addmm", "aten::embedding"} <= operators(trace)
    table = (folder / "rank0.operators.txt").read_text()
    assert "Rank 0, steps 7 to 9." in table
    assert "By self_cpu_time_total:" in table
    assert "aten::addmm" in table
    assert "By self_cpu_memory_usage:" in table


def test_looking_changes_no_number(shared_workspace: Workspace, profiled: Run) -> None:
    plain = train(shared_workspace.project, "plain", "run.max_iters=10")
    for key in ("step", "loss", "grad_norm", "lr", "samples"):
        assert profiled.column(key) == plain.column(key)
    assert not (plain.folder / "profile").exists()


@pytest.mark.slow
def test_ranks_shapes_and_stacks_that_are_asked_for(workspace: Workspace) -> None:
    profile = "run.profile={steps: [2, 2], ranks: [1], record_shapes: true, with_stack: true, top: 5}"
    run = train(workspace.project, "out", profile, "run.max_iters=3", "run.runner=fsdp", size=2)
    [folder] = (run.folder / "profile").iterdir()
    assert {path.name for path in folder.iterdir()} == {
        f"rank1.{ending}" for ending in ("pt.trace.json", "operators.txt")
    }
    table = (folder / "rank1.operators.txt").read_text()
    assert "Input Shapes" in table
    events = json.loads((folder / "rank1.pt.trace.json").read_text())["traceEvents"]
    assert any("trainer.py" in e.get("name", "") for e in events if e.get("cat") == "python_function")


@pytest.mark.slow
def test_a_resumed_run_profiles_what_is_left_of_a_window(workspace: Workspace) -> None:
    options = ("run.profile={steps: [5, 8]}", "run.lr_decay_iters=8")
    train(workspace.project, "out", *options, "run.max_iters=8", "run.save_interval=6", "run.keep_last=null")
    first = workspace.path / "out" / "profile"
    assert {folder.name for folder in first.iterdir()} == {"steps_000005-000008"}
    shutil.rmtree(first)
    shutil.rmtree(workspace.path / "out" / "checkpoints" / "step_000008")
    train(workspace.project, "out", *options, "run.max_iters=8")
    [folder] = first.iterdir()
    assert folder.name == "steps_000007-000008"
    assert steps_in(folder / "rank0.pt.trace.json") == ["ProfilerStep#7", "ProfilerStep#8"]


@pytest.mark.parametrize(
    ("profile", "words"),
    [
        ("{steps: [[2, 4], [7, 9]]}", "run.profile.steps.0: expected a whole number, got a list of 2 values"),
        ("{steps: [4, 2]}", "run.profile.steps: expected [first, last], such as [2, 4], got [4, 2]"),
        ("{steps: [0, 2]}", "run.profile.steps.0: expected a whole number of at least 1, got 0"),
        ("{steps: []}", "run.profile.steps: expected a list of 2 values (a whole number, a whole number), got 0"),
        ("{steps: [2, 3], ranks: []}", "run.profile.ranks: expected a list of a whole number that is not empty"),
        ("{step: [2, 3]}", "did you mean run.profile.steps?"),
    ],
)
def test_windows_that_make_no_sense_are_refused(workspace: Workspace, profile: str, words: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load_config(workspace.project, [f"run.profile={profile}"])
    assert words in str(raised.value)


def test_windows_and_ranks_that_the_run_has_not_are_refused(workspace: Workspace) -> None:
    options = load_config(workspace.project, [WINDOW]).run.profile
    assert options is not None
    options.check(9, 1)
    with pytest.raises(ConfigError, match="the window 7 to 9 extends beyond the last step of the run, 8"):
        options.check(8, 1)
    options.ranks = [0, 2]
    with pytest.raises(ConfigError, match=r"run\.profile\.ranks: there is no rank 2; the last rank is 1"):
        options.check(9, 2)
