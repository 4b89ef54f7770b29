"""Stop anywhere, in any way, resume: nothing differs from the run that never stopped."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import time
from pathlib import Path

import pytest
from crosstrain_plugins.builtin.commands.status.status import status

from conftest import Run, Workspace, kill, logged_step, wait_until
from crosstrain.checkpoint import folders
from crosstrain.config.load import load_config
from crosstrain.data.splits import open_split
from fixtures_kill import INTERVALS, SLOW_MODEL, assert_same_weights, numbers
from fixtures_processes import start_as_user, train_as_user
from fixtures_ranks import mostly_slow, train


@pytest.fixture(scope="module")
def uninterrupted(shared_workspace: Workspace) -> Run:
    return train(shared_workspace.project, "uninterrupted", *INTERVALS)


@pytest.mark.slow
def test_killed_at_several_points(shared_workspace: Workspace, uninterrupted: Run) -> None:
    folder = shared_workspace.path / "killed"
    for step in (2, 9, 17):  # before the first checkpoint, between checkpoints, near the end
        process = shared_workspace.start("killed", *INTERVALS)
        wait_until(lambda step=step: logged_step(folder) >= step, process)
        kill(process)
    resumed = shared_workspace.train("killed", *INTERVALS)

    assert "resuming" in resumed.out
    assert numbers(resumed) == numbers(uninterrupted)
    assert_same_weights(resumed.checkpoint(20), uninterrupted.checkpoint(20))


def test_killed_during_a_save(shared_workspace: Workspace, uninterrupted: Run) -> None:
    plugins = shared_workspace.path / "plugins"
    plugins.mkdir()
    (plugins / "slow.py").write_text(SLOW_MODEL)
    model = shared_workspace.config["model"] | {"arch": "slow_to_save"}
    options = (*INTERVALS, f"run.plugins=[{plugins}]", f"model={json.dumps(model)}", "run.save_best=false")
    folder = shared_workspace.path / "killed_saving"
    process = start_as_user(shared_workspace, "killed_saving", *options)
    wait_until(lambda: (folder / "checkpoints" / ".step_000008.tmp" / "config.json").exists(), process)
    kill(process)
    assert not (folder / "checkpoints" / "step_000008").exists()
    resumed = train_as_user(shared_workspace, "killed_saving", *options)

    assert "step_000004 at step 4" in resumed.out
    assert [row[:5] for row in numbers(resumed)] == [row[:5] for row in numbers(uninterrupted)]
    assert_same_weights(resumed.checkpoint(20), uninterrupted.checkpoint(20))
    assert not list((folder / "checkpoints").glob(".step_*")), "what the killed save left is gone"


@pytest.mark.slow
def test_a_restart_keeps_the_moments_of_a_run_that_began_without_those_of_another(workspace: Workspace) -> None:
    def trained(name: str, *options: str) -> tuple[Run, bool]:
        """Train in a process of its own; returns the run, and True where this start left moments behind."""
        log = workspace.path / name / "log.txt"
        before = log.read_text() if log.exists() else ""
        run = train(workspace.project, name, *INTERVALS, "run.lr_decay_iters=20", *options)
        return run, "is not loaded" in log.read_text().removeprefix(before)

    first, _ = trained("first", "run.max_iters=4")
    begun = (f"run.resume_from={first.folder}", "run.resume_optimizer=false")
    straight, behind = trained("straight", *begun, "run.max_iters=12")
    assert behind
    trained("restarted", *begun, "run.max_iters=8")
    restarted, behind = trained("restarted", *begun, "run.max_iters=12")
    assert not behind
    assert [row[:5] for row in numbers(restarted)] == [row[:5] for row in numbers(straight)]
    assert_same_weights(restarted.checkpoint(12), straight.checkpoint(12))
    assert trained("restarted", *begun, "run.max_iters=13", "run.optimizer={name: sgd, momentum: 0.9}")[1]


@pytest.mark.slow  # test_any_to_any has such pairs, without the launcher
@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1)])
def test_resume_on_another_number_of_workers(
    shared_workspace: Workspace, uninterrupted: Run, before: int, after: int
) -> None:
    name = f"from_{before}_to_{after}"
    schedule = "run.lr_decay_iters=20"  # what it is by default in the uninterrupted run
    shared_workspace.train(name, *INTERVALS, schedule, "run.max_iters=10", nproc=before)
    resumed = shared_workspace.train(name, *INTERVALS, nproc=after)

    assert resumed.column("step") == list(range(1, 21))
    assert resumed.column("samples") == uninterrupted.column("samples")
    # Rounding differs where gradients are summed in another order; see test_equivalence for its size.
    assert resumed.column("loss") == pytest.approx(uninterrupted.column("loss"), rel=1e-6)


@pytest.mark.parametrize("number", mostly_slow([signal.SIGINT, signal.SIGTERM], [signal.SIGTERM]))
@pytest.mark.parametrize("nproc", mostly_slow([1, 2], [1]))
def test_a_stop_signal_saves_and_leaves(workspace: Workspace, number: signal.Signals, nproc: int) -> None:
    folder = workspace.path / "out"
    process = start_as_user(workspace, "out", "run.max_iters=100000", "run.num_workers=1", nproc=nproc)
    wait_until(lambda: logged_step(folder) >= 3, process)
    if number == signal.SIGINT or nproc == 2:  # a terminal sends it to the group, as `timeout` and `kill -- -GROUP` do
        os.killpg(process.pid, number)
    else:
        process.send_signal(number)
    out = process.communicate(timeout=60)[0]

    assert process.returncode == 128 + number, out
    assert "Traceback" not in out
    last = logged_step(folder)
    assert (folder / "checkpoints" / "latest").read_text().strip() == f"step_{last:06d}"
    assert f"stopped at step {last}" in out
    found = status(folder)
    assert (found["state"], found["checkpoint"]) == ("stopped", last)


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(workspace: Workspace) -> None:
    options = ("run.max_iters=8", "run.save_interval=4", "run.lr_decay_iters=12")
    run = train(workspace.project, "out", *options)
    damaged = run.checkpoint(8) / "model.safetensors"
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)
    resumed = train_as_user(workspace, "out", *options[1:], "run.max_iters=12")

    assert f"skipping a damaged checkpoint: {Path('out/checkpoints/step_000008/model.safetensors')}" in resumed.out
    assert "step_000004 at step 4" in resumed.out
    assert resumed.column("step") == list(range(1, 13)), "no step stands twice"
    assert (run.folder / "checkpoints" / "step_000008.damaged").is_dir()


def test_a_damaged_checkpoint_does_not_count_among_those_that_are_kept(workspace: Workspace) -> None:
    run = train(workspace.project, "out", "run.max_iters=4", "run.save_interval=2", "run.lr_decay_iters=12")
    path = run.checkpoint(4) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    train(workspace.project, "out", "run.max_iters=5", "run.keep_last=2", "run.lr_decay_iters=12")
    kept = sorted(path.name for path in (run.folder / "checkpoints").glob("step_*"))
    assert kept == ["step_000002", "step_000004", "step_000005"], "4, which was passed over, is damaged"


def test_fresh_starts_over_and_keeps_what_was_there(workspace: Workspace) -> None:
    train(workspace.project, "out", "run.max_iters=2")
    again = train_as_user(workspace, "out", "run.max_iters=3", flags=("--fresh",))
    assert again.column("step") == [1, 2, 3]
    assert (workspace.path / "out.1" / "checkpoints" / "step_000002").is_dir()


def test_another_model_in_a_runs_folder_is_told_what_to_do(workspace: Workspace) -> None:
    train(workspace.project, "out", "run.max_iters=2")
    for change, said in (("n_layer=3", "the model's transformer.h.2.* is missing"), ("n_embd=64", "has shape")):
        with pytest.raises(
            AssertionError, match=rf"{said}.*; to start over, use a different run.output_dir, or --fresh"
        ):
            train(workspace.project, "out", "run.max_iters=3", f"model.{change}")


def test_a_finished_run_does_nothing_more_and_says_so(workspace: Workspace) -> None:
    first = train(workspace.project, "out", "run.max_iters=2")
    changed = (first.checkpoint(2) / "manifest.json").stat().st_mtime_ns
    time.sleep(0.01)
    second = train(workspace.project, "out", "run.max_iters=2", "run.seed=7", "run.lr_sched=constant")
    assert (second.checkpoint(2) / "manifest.json").stat().st_mtime_ns == changed
    assert second.column("step") == [1, 2]
    log = (second.folder / "log.txt").read_text()
    assert log.count("changed since") == 1
    assert 'changed since step_000002: run.seed 1234 -> 7, run.lr_sched "cosine" -> "constant"\n' in log, log
    assert "all 2 steps are done: raise run.max_iters" in log


@pytest.mark.slow
def test_epochs_end_with_a_validation_and_a_checkpoint(workspace: Workspace) -> None:
    """An epoch ends with the step that has its last sample, also where it began with another batch size."""
    options = ("run.max_epoch=3", "run.max_iters=null", "run.eval_interval=epoch", "run.save_interval=epoch")
    every = (*options, "run.keep_last=null", "run.save_best=false", "run.eval_iters=1")
    samples = len(open_split(load_config(workspace.project), "train"))
    assert samples % 8, "an epoch that ends with a batch would not tell"
    run = train(workspace.project, "out", *every, "run.global_batch_size=8")
    ends = [math.ceil(k * samples / 8) for k in (1, 2, 3)]
    assert [row["step"] for row in run.rows if "val_loss" in row] == ends
    assert folders.steps(run.folder / "checkpoints") == ends
    shutil.copytree(run.checkpoint(ends[0]), workspace.path / "again" / "checkpoints" / f"step_{ends[0]:06d}")
    again = train(workspace.project, "again", *every, "run.global_batch_size=4")
    second = next(row["step"] for row in again.rows if "val_loss" in row)
    assert second == ends[0] + math.ceil((2 * samples - 8 * ends[0]) / 4)


def test_a_longer_run_says_at_which_learning_rate_it_goes_on(workspace: Workspace) -> None:
    train(workspace.project, "out", "run.max_iters=2")
    run = train(workspace.project, "out", "run.max_iters=8")
    log = (run.folder / "log.txt").read_text()
    rate = f"{run.column('lr')[2]:.3E}"
    assert f"the learning-rate schedule now spans 8 steps: {rate} at step 3\n" in log, log
