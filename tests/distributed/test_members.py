"""With `run.on_lost_rank: continue`, the workers that are left go on with the state in their memory."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from hashlib import sha256
from pathlib import Path

import pytest
from crosstrain_plugins.builtin.commands.drill.faults import FAULTS

from conftest import Run, Workspace, kill, logged_step, wait_until
from crosstrain.checkpoint.files import Reader
from fixtures_kill import changes, end_of, workers
from fixtures_ranks import mostly_slow, train

OPTIONS = (
    "run.global_batch_size=12", "run.micro_batch_size=1", "run.save_interval=null", "run.bitwise=true",
    "run.collective_timeout=20", "run.lr_sched=constant", "run.log_interval=5",
)  # fmt: skip
EMA = "run.callbacks=[{name: ema, decay: 0.9}]"


@pytest.fixture(scope="module")
def undisturbed(shared_workspace: Workspace) -> Callable[..., dict[str, str]]:
    """The digests after a number of steps of one process."""

    @cache
    def run(steps: int, *options: str) -> dict[str, str]:
        name = f"one{steps}_{len(list(shared_workspace.path.glob('one*')))}"
        return end_of(train(shared_workspace.project, name, *OPTIONS, f"run.max_iters={steps}", *options).folder)

    return run


def weights_of(folder: Path) -> dict[str, str]:
    """The SHA-256 of each parameter in the last checkpoint."""
    checkpoint = max((folder / "checkpoints").glob("step_*"))
    reader = Reader.open(checkpoint)
    return {name: sha256(reader.whole(name).numpy().tobytes()).hexdigest() for name in reader.names("param")}


@contextmanager
def started(
    workspace: Workspace, name: str, *options: str, nproc: int = 3
) -> Iterator[tuple[subprocess.Popen[str], Run]]:
    """A run that saves only at its end, after its twentieth step."""
    process = workspace.start(name, *OPTIONS, "run.on_lost_rank=continue", *options, nproc=nproc)
    run = Run(workspace.path / name)
    try:
        wait_until(lambda: logged_step(run.folder) >= 20, process)
        yield process, run
    finally:
        kill(process)


@pytest.mark.parametrize("lost", mostly_slow([0, 1, 2], [0]))
def test_the_others_go_on_with_the_same_bits(
    shared_workspace: Workspace, undisturbed: Callable[..., dict[str, str]], lost: int
) -> None:
    with started(shared_workspace, f"lost{lost}", "run.max_iters=60", EMA) as (process, run):
        before = sorted(workers(process.pid))
        os.kill(before[lost], signal.SIGKILL)
        wait_until(lambda: bool(changes(run.folder)), process)
        assert sorted(workers(process.pid)) == before[:lost] + before[lost + 1 :], "the same processes"
        assert process.wait(300) == 0
    (told,) = changes(run.folder)
    found = re.fullmatch(rf"rank {lost} was killed by SIGKILL; 2 ranks go on from step (\d+)", told)
    assert found is not None
    assert int(found[1]) >= 20
    assert end_of(run.folder) == undisturbed(60, EMA)


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["kill", "freeze"])
def test_a_new_worker_joins_at_the_end_of_a_step(
    shared_workspace: Workspace, undisturbed: Callable[..., dict[str, str]], fault: str
) -> None:
    options = ("run.max_iters=600", "run.max_restarts=1", "run.collective_timeout=5")
    with started(shared_workspace, fault, *options) as (process, run):
        before = sorted(workers(process.pid))
        os.kill(before[1], signal.SIGKILL if fault == "kill" else signal.SIGSTOP)
        wait_until(lambda: len(changes(run.folder)) == 2, process)
        assert len({*before} & {*workers(process.pid)}) == 2, "the others are the same processes"
        assert process.wait(300) == 0
    lost, added = changes(run.folder)
    named = {"kill": "rank 1 was killed by SIGKILL", "freeze": "rank 1 gave no sign of life for 5 s"}
    assert lost.startswith(named[fault] + "; 2 ranks go on from step ")
    assert added.startswith("a worker was added; 3 ranks go on from step ")
    assert end_of(run.folder) == undisturbed(600)


@pytest.mark.slow
def test_a_number_of_ranks_that_does_not_suit_leaves_one_out(
    shared_workspace: Workspace, undisturbed: Callable[..., dict[str, str]]
) -> None:
    """A batch of 8 suits 4 ranks and 2, but not 3."""
    batch = "run.global_batch_size=8"
    with started(shared_workspace, "left_out", "run.max_iters=60", batch, nproc=4) as (process, run):
        os.kill(sorted(workers(process.pid))[3], signal.SIGKILL)
        assert process.wait(300) == 0
    assert [line.partition(";")[2].partition(" from")[0] for line in changes(run.folder)] == [" 2 ranks go on"]
    assert end_of(run.folder) == undisturbed(60, batch)


@pytest.mark.slow
@pytest.mark.parametrize("lost", range(4))
def test_a_lost_shard_is_taken_from_its_copy(shared_workspace: Workspace, lost: int) -> None:
    """Two copies of the model lie on two ranks each. One copy goes on, or the parts of both that make a whole."""
    options = ("run.runner={name: fsdp, shard_size: 2}", "run.global_batch_size=8", "run.bitwise=false")
    for attempt in range(3):  # on a busy machine, ranks may be lost while others have finished the step, or not
        name = f"copies{lost}_{attempt}"
        with started(shared_workspace, name, "run.max_iters=60", *options, nproc=4) as (process, run):
            os.kill(sorted(workers(process.pid))[lost], signal.SIGKILL)
            assert process.wait(300) == 0
        (told,) = changes(run.folder)
        found = re.fullmatch(rf"rank {lost} was killed by SIGKILL; 2 ranks go on from step (\d+)", told)
        assert found is not None
        if "a part of" not in (run.folder / "log.txt").read_text():
            break
    assert int(found[1]) >= 20, "there is no checkpoint, so a run without copies would go on from step 0"
    before = f"run.max_iters={found[1]}"
    train(shared_workspace.project, f"{name}_planned", *OPTIONS, *options, before, size=4)
    planned = train(shared_workspace.project, f"{name}_planned", *OPTIONS, *options, "run.max_iters=60", size=2)
    assert weights_of(run.folder) == weights_of(planned.folder)


@pytest.mark.slow
def test_a_lost_shard_without_a_copy_is_read_from_the_newest_checkpoint(shared_workspace: Workspace) -> None:
    options = ("run.runner=fsdp", "run.bitwise=false", "run.max_iters=60", "run.save_interval=10")
    with started(shared_workspace, "no_copy", *options) as (process, run):
        os.kill(sorted(workers(process.pid))[1], signal.SIGKILL)
        assert process.wait(300) == 0
    (told,) = changes(run.folder)
    found = re.fullmatch(r"rank 1 was killed by SIGKILL; 2 ranks go on from step (\d+)", told)
    assert found is not None
    assert int(found[1]) >= 10
    assert int(found[1]) % 10 == 0


@pytest.mark.slow
def test_teams_go_on_without_a_lost_one(shared_workspace: Workspace) -> None:
    """Three teams of one rank become two, which keep their weights, optimizer states and errors of rounding."""
    every, lost = 10, 2  # a planned change of ranks keeps the first teams
    runner = f"{{name: diloco, groups: 3, min_groups: 2, every: {every}}}"
    options = (f"run.runner={runner}", "run.bitwise=false", "run.max_iters=60")
    with started(shared_workspace, "teams", *options) as (process, run):
        os.kill(sorted(workers(process.pid))[lost], signal.SIGKILL)
        assert process.wait(300) == 0
    (told,) = changes(run.folder)
    found = re.fullmatch(rf"rank {lost} was killed by SIGKILL; 2 ranks go on from step (\d+)", told)
    assert found is not None
    assert int(found[1]) % every == every - 1, "the other teams do not notice the loss before they exchange"
    before = f"run.max_iters={found[1]}"
    name = "teams_planned"
    train(shared_workspace.project, name, *OPTIONS, *options, before, size=3)
    planned = train(shared_workspace.project, name, *OPTIONS, *options, size=2)
    assert weights_of(run.folder) == weights_of(planned.folder)


@pytest.mark.slow
def test_a_replaced_rank_takes_part_in_its_team_again(shared_workspace: Workspace) -> None:
    """Two teams of two ranks become two of one, and two of two again, without a file."""
    options = (
        "run.runner={name: diloco, groups: 2, every: 10}", "run.bitwise=false", "run.max_iters=1000",
        "run.global_batch_size=8", "run.max_restarts=1",
    )  # fmt: skip
    with started(shared_workspace, "replaced", *options, nproc=4) as (process, run):
        os.kill(sorted(workers(process.pid))[3], signal.SIGKILL)
        wait_until(lambda: any("; 4 ranks go on from step " in change for change in changes(run.folder)), process)
        together = logged_step(run.folder) + 50
        wait_until(lambda: logged_step(run.folder) >= together, process)
        process.terminate()
        assert process.wait(60) == 128 + signal.SIGTERM
    assert "newest checkpoint" not in (run.folder / "log.txt").read_text()
    losses = [row["loss"] for row in run.rows]
    assert max(losses[-3:]) < losses[0]


@pytest.mark.slow
def test_workers_that_lose_their_connections_go_on(
    shared_workspace: Workspace, undisturbed: Callable[..., dict[str, str]]
) -> None:
    with started(shared_workspace, "cut", "run.max_iters=60") as (process, run):
        before = workers(process.pid)
        FAULTS["cut"](before[1])
        wait_until(lambda: bool(changes(run.folder)), process)
        assert workers(process.pid) == before
        assert process.wait(300) == 0
    assert changes(run.folder)[0].startswith("the workers lost their connections; 3 ranks go on from step ")
    assert end_of(run.folder) == undisturbed(60)


@pytest.mark.slow
def test_the_last_worker_that_is_lost_ends_the_run(shared_workspace: Workspace) -> None:
    with started(shared_workspace, "all_lost", "run.max_iters=100000", nproc=2) as (process, _):
        for pid in workers(process.pid):
            os.kill(pid, signal.SIGKILL)
        out = process.communicate(timeout=100)[0]
    assert process.returncode == 1
    assert re.search(r"^error: rank \d was killed by SIGKILL", out, re.MULTILINE)


@pytest.mark.slow
def test_an_error_of_the_program_ends_the_run(shared_workspace: Workspace, tmp_path: Path) -> None:
    (tmp_path / "bug.py").write_text(
        "from crosstrain import Callback, registry\n"
        "@registry.register_callback('bug')\n"
        "class Bug(Callback):\n"
        "    def after_step(self, metrics):\n"
        "        assert metrics.step < 30 or self.trainer.runner.world.rank != 1, 'a bug'\n"
    )
    options = (f"run.plugins=[{tmp_path}/bug.py]", "run.callbacks=[{name: bug}]", "run.max_iters=100")
    with started(shared_workspace, "bug", *options, nproc=2) as (process, _):
        out = process.communicate(timeout=100)[0]
    assert process.returncode == 1
    assert "bug failed in after_step: AssertionError: a bug" in out


@pytest.mark.slow
def test_a_signal_saves_and_ends_the_run(shared_workspace: Workspace) -> None:
    with started(shared_workspace, "stopped", "run.max_iters=100000") as (process, run):
        process.terminate()
        assert process.wait(60) == 128 + signal.SIGTERM
    assert (run.folder / "checkpoints" / "latest").exists()


def test_refusals(shared_workspace: Workspace) -> None:
    options = ("run.on_lost_rank=continue", "run.runner=zero2")
    refused = shared_workspace.train("refused", *options, nproc=2, fails=True)
    assert refused.err.startswith("error: run.on_lost_rank: deepspeed cannot leave its process groups")
    overlap = "run.runner={name: diloco, every: 10, overlap: 2}"
    refused = shared_workspace.train("refused", "run.on_lost_rank=continue", overlap, nproc=2, fails=True)
    assert refused.err.startswith("error: run.on_lost_rank: continue cannot take over an exchange that is under way")
