"""One run in a folder, whatever is done to the folder meanwhile; and both runs' checkpoints whole afterwards."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from conftest import Run, Workspace, logged_step
from crosstrain.checkpoint import folders, run_folder
from crosstrain.checkpoint.checkpointer import Checkpointer
from crosstrain.checkpoint.files import Reader
from crosstrain.checkpoint.run_folder import RunFolder
from crosstrain.distributed.group import Group
from crosstrain.utils.errors import CheckpointError, TrainingError, UserError
from fixtures_kill import assert_same_weights, numbers
from fixtures_processes import Training
from fixtures_ranks import mostly_slow

Train = Callable[..., Training]
ENDLESS = "run.max_iters=1000000"
OPTIONS = ("run.save_interval=2", "run.keep_last=null", "run.lr_decay_iters=400")


def assert_whole(folder: Path, steps: list[int]) -> None:
    """The checkpoints are those of `steps`, one run's, and every byte of them is as written."""
    assert folders.steps(folder / "checkpoints") == steps
    for step in steps:
        Reader.open(folders.step_folder(folder / "checkpoints", step)).verify()
    assert len({folders.run_of(folders.step_folder(folder / "checkpoints", step)) for step in steps}) == 1
    assert not list((folder / "checkpoints").glob("*.damaged"))


@pytest.fixture
def trainings(workspace: Workspace) -> Iterator[Train]:
    started: list[Training] = []

    def train(name: str, *options: str, **more: Any) -> Training:
        started.append(Training(workspace, name, *OPTIONS, *options, **more))
        return started[-1]

    yield train
    for training in started:
        for rank in training.ranks:
            rank.kill()


def assert_steps(folder: Path, first: int = 1) -> list[int]:
    """Every step from `first` on is in metrics.jsonl once; returns them."""
    steps = Run(folder).column("step")
    assert steps == list(range(first, first + len(steps)))
    return steps


def resumed(trainings: Train, folder: Path) -> None:
    """What a run left goes on from its newest checkpoint."""
    assert_steps(folder)
    last = folders.steps(folder / "checkpoints")[-1]
    more = trainings(folder.name, f"run.max_iters={last + 3}")
    assert more.end() == 0, more.said
    assert f"at step {last}" in more.said
    assert assert_steps(folder)[-1] == last + 3


@pytest.mark.parametrize("size", mostly_slow([1, 2], [1]))
def test_a_moved_folder_ends_the_run_and_keeps_checkpoints(trainings: Train, workspace: Workspace, size: int) -> None:
    living = trainings("out", ENDLESS, size=size)
    living.until_step(5)
    elsewhere = workspace.path / "elsewhere"
    living.folder.rename(elsewhere)
    assert living.end() == 1, living.said
    sentence = f"error: run.output_dir: {living.folder} was moved, deleted or taken over by a different run "
    assert f"{sentence}during training, so this run ends; if you moved it to PLACE, the same command" in living.said
    assert "Traceback" not in living.said
    assert not living.folder.exists()
    resumed(trainings, elsewhere)
    assert_whole(elsewhere, folders.steps(elsewhere / "checkpoints"))


def test_a_save_that_is_under_way_does_not_make_a_moved_folder_again(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.create({})
    keeper = Checkpointer(folder.checkpoints, Group(), lambda *_: None, folder.run_id)
    folder.path.rename(tmp_path / "elsewhere")
    keeper.save(1, [], {"step": 1}, background=False)
    with pytest.raises(CheckpointError, match="no longer belongs to this run"):
        keeper.wait()
    assert not folder.path.exists(), "the next run here would take it for its own"
    with pytest.raises(TrainingError, match="was moved"):
        folder.check_kept()
    (tmp_path / "elsewhere").rename(folder.path)
    folder.check_kept()
    keeper.save(1, [], {"step": 1}, background=False)
    keeper.wait()
    assert folders.steps(folder.checkpoints) == [1]


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2])
def test_a_folder_that_another_run_replaced(trainings: Train, workspace: Workspace, size: int) -> None:
    second = ("run.max_iters=30", "run.seed=2")
    alone = trainings("alone", *second)
    assert alone.end() == 0, alone.said
    first = trainings("out", ENDLESS, "run.log_interval=1000", size=size)  # it looks only when it saves
    first.until(lambda: bool(folders.steps(first.folder / "checkpoints")))
    first.folder.rename(workspace.path / "old")
    other = trainings("out", *second)
    assert first.end() == 1, first.said
    assert other.end() == 0, other.said
    assert numbers(Run(other.folder)) == numbers(Run(alone.folder))
    assert_same_weights(Run(other.folder).checkpoint(30), Run(alone.folder).checkpoint(30))
    assert_whole(other.folder, folders.steps(alone.folder / "checkpoints"))
    assert_whole(workspace.path / "old", folders.steps(workspace.path / "old" / "checkpoints"))
    ids = {(folder / ".run_id").read_text() for folder in (other.folder, alone.folder, workspace.path / "old")}
    assert len(ids) == 3


@pytest.mark.slow
def test_a_deleted_folder_whose_place_another_run_took(trainings: Train, workspace: Workspace) -> None:
    first = trainings("out", ENDLESS)
    first.until_step(5)
    (pid,) = (rank.pid for rank in first.ranks)
    os.kill(pid, signal.SIGSTOP)
    shutil.rmtree(first.folder)
    other = trainings("out", "run.max_iters=30", "run.seed=2")
    other.until_step(3)
    os.kill(pid, signal.SIGCONT)
    assert first.end() == 1, first.said
    assert f"run.output_dir: {first.folder} was moved, deleted or taken over by a different run" in first.said
    assert other.end() == 0, other.said
    assert_whole(other.folder, list(range(2, 31, 2)))
    assert assert_steps(other.folder)[-1] == 30
    assert not (workspace.path / "out.1").exists()


OWN = [".", ".lock", ".run_id"]  # without these the folder is no longer the run's
DELETED = [*OWN, "checkpoints", "log.txt", "metrics.jsonl"]


@pytest.mark.parametrize("what", mostly_slow(DELETED, [".", "checkpoints"]))
def test_what_is_deleted_is_made_again_or_ends_the_run(trainings: Train, workspace: Workspace, what: str) -> None:
    training = trainings("out", "run.max_iters=60")
    folder = training.folder
    training.until_step(5)
    os.kill(training.ranks[0].pid, signal.SIGSTOP)
    time.sleep(0.1)  # a thread on another core may still be renaming a checkpoint
    if (folder / what).is_dir():
        shutil.rmtree(folder / what)
    else:
        (folder / what).unlink()
    os.kill(training.ranks[0].pid, signal.SIGCONT)
    assert training.end() == (what in OWN), training.said
    assert "Traceback" not in training.said
    assert (f"{folder} was moved, deleted or taken over by a different run" in training.said) == (what in OWN)
    if what not in OWN:
        assert "step 60/60" in (folder / "log.txt").read_text()
        assert Run(folder).column("step")[-1] == 60
        Reader.open(Run(folder).checkpoint(60)).verify()


@pytest.mark.slow
@pytest.mark.parametrize("flags", [(), ("--fresh",)])
def test_a_second_start_beside_a_living_run(trainings: Train, workspace: Workspace, flags: tuple[str, ...]) -> None:
    first = trainings("out", ENDLESS)
    first.until_step(5)
    second = trainings("out", ENDLESS, "run.seed=2", flags=flags)
    assert second.end() == 1, second.said
    sentence = f"error: run.output_dir: another process is training in {first.folder}; choose a different folder"
    assert second.said.strip() == sentence
    os.kill(first.ranks[0].pid, signal.SIGTERM)
    assert first.end() == 0, first.said
    assert not (workspace.path / "out.1").exists()
    assert_whole(first.folder, folders.steps(first.folder / "checkpoints"))
    assert yaml.safe_load((first.folder / "config.yaml").read_text())["run"]["seed"] != 2
    assert_steps(first.folder)


def test_a_held_folder_is_not_set_aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_folder, "_PATIENCE", 0.1)
    holder = RunFolder(tmp_path / "out")
    holder.create({})
    with pytest.raises(UserError, match="another process is training"):
        RunFolder(tmp_path / "out").set_aside()
    assert not (tmp_path / "out.1").exists()


@pytest.mark.slow
def test_another_runs_checkpoints_are_left_alone(trainings: Train, workspace: Workspace) -> None:
    """But for those that a new folder begins with."""
    for name, seed, steps in (("a", 1, 4), ("b", 2, 8)):
        run = trainings(name, f"run.max_iters={steps}", f"run.seed={seed}")
        assert run.end() == 0, run.said
    a, b = workspace.path / "a", workspace.path / "b"
    theirs = folders.step_folder(b / "checkpoints", 8)
    copy = Path(shutil.copytree(theirs, folders.step_folder(a / "checkpoints", 8)))

    refused = trainings("a", "run.max_iters=10")
    assert refused.end() == 1
    assert refused.said.strip().endswith(
        f"error: {copy} is a checkpoint of a different run; move it elsewhere and set run.resume_from to its "
        f"new path to continue from it, or start over in a new folder with --fresh"
    )
    named = trainings("c", "run.max_iters=10", f"run.resume_from={theirs}")
    assert named.end() == 0, named.said
    assert f"resuming {theirs} at step 8" in named.said
    beyond = trainings("d", "run.max_iters=8", f"run.resume_from={theirs}")
    assert beyond.end() == 1
    assert "is at step 8, but this run ends after step 8: train longer" in beyond.said

    # An older one neither stops the run nor goes when the run's own are deleted.
    copy.rename(copy.with_name("step_000001"))
    pruned = trainings("a", "run.max_iters=10", "run.keep_last=1")
    assert pruned.end() == 0, pruned.said
    assert folders.steps(a / "checkpoints") == [1, 10]
    Reader.open(copy.with_name("step_000001")).verify()

    # One that comes while the run trains is not replaced.
    living = trainings("d", ENDLESS, "run.save_interval=1000000")
    living.until_step(3)
    os.kill(living.ranks[0].pid, signal.SIGSTOP)
    mine = logged_step(living.folder)
    for step in range(mine, mine + 5):
        shutil.copytree(theirs, folders.step_folder(living.folder / "checkpoints", step))
    os.kill(living.ranks[0].pid, signal.SIGTERM)
    os.kill(living.ranks[0].pid, signal.SIGCONT)
    assert living.end() == 1, living.said
    assert "is a checkpoint of a different run; move it elsewhere" in living.said
    assert {folders.run_of(p) for p in (living.folder / "checkpoints").glob("step_*")} == {folders.run_of(theirs)}

    shutil.copytree(b / "checkpoints", workspace.path / "e" / "checkpoints")
    adopted = trainings("e", "run.max_iters=10")
    assert adopted.end() == 0, adopted.said
    assert (workspace.path / "e" / ".run_id").read_text() == (b / ".run_id").read_text()
    assert_whole(workspace.path / "e", [2, 4, 6, 8, 10])
