"""Starting, joining and dying."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from conftest import ENVIRONMENT, ROOT, Workspace, logged_step, session, wait_until
from crosstrain.distributed.launch.cluster_env import worker_environment
from crosstrain.utils.errors import ConfigError
from fixtures_processes import program, start_as_user, train_as_user

FAULTY_RUNNER = '''
import os, signal, sys
from dataclasses import dataclass
from crosstrain.config.registry import registry
from crosstrain.utils.errors import TrainingError
DDP = registry.get("runner", "ddp")

@registry.register_runner("faulty")
class Faulty(DDP):
    """Rank 1 fails at the third step, in the way that is asked for."""
    @dataclass
    class Options(DDP.Options):
        how: str = "raise"
    steps = 0
    def forward_backward(self, micro_batches, num_targets):
        self.steps += 1
        if self.steps == 3 and self.world.rank == 1:
            if self.options.how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.options.how == "user":
                raise TrainingError("the moon is in the wrong phase; wait a week")
            raise ZeroDivisionError("a bug in a plugin")
        return super().forward_backward(micro_batches, num_targets)
'''


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        pytest.param("raise", "ZeroDivisionError: a bug in a plugin", marks=pytest.mark.slow),
        pytest.param("kill", "rank 1 was killed by SIGKILL", marks=pytest.mark.slow),
        pytest.param("user", "error: the moon is in the wrong phase; wait a week", marks=pytest.mark.slow),
    ],
)
def test_a_dead_rank_takes_the_others_down_and_its_error_is_shown_once(
    workspace: Workspace, how: str, expected: str
) -> None:
    (workspace.path / "faulty.py").write_text(FAULTY_RUNNER)
    started = time.monotonic()
    process = start_as_user(
        workspace,
        "out",
        f"run.plugins=[{workspace.path}]",
        f"run.runner={{name: faulty, how: {how}}}",
        "run.max_iters=1000000",
        nproc=2,
        merged=False,
    )
    out, err = process.communicate(120)
    assert process.returncode == 1
    assert (out + err).count(expected) == 1, err
    assert (out + err).count("Traceback") == (how == "raise")
    if how == "user":
        assert err.strip() == expected
    last = (workspace.path / "out" / "log.txt").read_text().splitlines()[-1]
    assert " error: " in last
    assert expected.removeprefix("error: ") in last
    assert time.monotonic() - started < 60
    assert session(process) == [], "nothing is left"


@pytest.mark.slow
def test_a_run_leaves_nothing_behind_but_its_folder(workspace: Workspace) -> None:
    place = workspace.path / "place"
    place.mkdir()
    command = workspace.command("run.output_dir=out", "run.max_iters=1", nproc=2)
    done = subprocess.run(command, cwd=workspace.path, env=ENVIRONMENT | {"TMPDIR": str(place)}, timeout=120)
    assert done.returncode == 0
    assert [path.name for path in place.iterdir() if not path.name.startswith("torchinductor_")] == []


@pytest.mark.slow
def test_workers_die_with_their_launcher(workspace: Workspace) -> None:
    process = start_as_user(workspace, "out", "run.max_iters=1000000", nproc=2)
    wait_until(lambda: logged_step(workspace.path / "out") >= 2, process)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    deadline, rows = time.monotonic() + 30, -1
    while rows != logged_step(workspace.path / "out"):  # steps take a small part of a second
        assert time.monotonic() < deadline, "orphans go on training"
        rows = logged_step(workspace.path / "out")
        time.sleep(1.5)


@pytest.mark.slow
def test_torchrun_joins_instead_of_launching(workspace: Workspace) -> None:
    options = ["run.output_dir=joined", "run.max_iters=3"]
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1", "--nproc-per-node=2",
        str(ROOT / "train.py"), "--cfg-path", str(workspace.project), "--options", *options,
    ]  # fmt: skip
    env = ENVIRONMENT | {"GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(command, cwd=workspace.path, env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert "runner ddp on 2 cpu worker(s)" in done.stdout
    launched = workspace.train("launched", *options[1:], nproc=2)
    assert (workspace.path / "joined" / "metrics.jsonl").exists()
    assert done.stdout.count("saving") == launched.out.count("saving") == 1


def test_environments_of_launchers() -> None:
    assert worker_environment({}) is None
    assert worker_environment({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}) == {
        "RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
    }
    slurm = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "8", "SLURM_PROCID": "5", "SLURM_LOCALID": "1",
             "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.1", "SLURM_JOB_ID": "123"}  # fmt: skip
    joined = worker_environment(slurm)
    assert joined is not None
    assert (joined["RANK"], joined["WORLD_SIZE"], joined["LOCAL_RANK"]) == ("5", "8", "1")
    assert (joined["MASTER_ADDR"], joined["MASTER_PORT"]) == ("10.0.0.1", "20123")
    several = worker_environment(slurm | {"SLURM_STEP_NODELIST": "node[03-05,09]"})
    assert several is not None
    assert several["MASTER_ADDR"] == "node03"
    batch_script = {"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}  # inside sbatch, outside srun: launch as usual
    assert worker_environment(batch_script) is None
    mpi = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
    here = worker_environment(mpi | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"})
    assert here is not None
    assert here["MASTER_ADDR"] == "127.0.0.1"
    with pytest.raises(ConfigError, match="MASTER_ADDR"):
        worker_environment(mpi | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1"})


def test_a_number_of_workers_that_makes_no_sense(workspace: Workspace) -> None:
    said = program(workspace.path, "train", *workspace.command(nproc=-1)[2:]).err
    assert "--nproc-per-node: expected at least 1" in said


def test_the_folder_is_untouched_by_a_run_that_cannot_start(workspace: Workspace) -> None:
    run = train_as_user(workspace, "out", "run.global_batch_size=7", nproc=2, fails=True)
    assert run.code == 1
    assert not Path(run.folder).exists()


@pytest.mark.parametrize("under_launcher", [False, True])
def test_the_second_sigint_breaks_no_save_of_our_launchers_workers(under_launcher: bool) -> None:
    """The system sends a worker SIGINT for each thread of a killed launcher that it is handed to."""
    script = (
        "import os, signal; from crosstrain.distributed.launch.signals import StopRequest; "
        f"stop = StopRequest({under_launcher}); "
        "[os.kill(os.getpid(), signal.SIGINT) for _ in range(3)]; print(bool(stop))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=ENVIRONMENT, timeout=60)
    assert (done.returncode, done.stdout) == ((0, "True\n") if under_launcher else (-signal.SIGINT, ""))
