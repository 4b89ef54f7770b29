"""The batch file, as shipped and as `launch` prints it, on a real SLURM of one machine.

SLURM is Debian's packages, with all that they keep in a temporary folder.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from conftest import ENVIRONMENT, ROOT, Run, Workspace, logged_step
from fixtures_kill import INTERVALS, assert_same_weights, numbers
from fixtures_ranks import free_port

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scancel", "scontrol", "squeue")
STEPS = 300
OPTIONS = (*INTERVALS, f"run.max_iters={STEPS}", "run.save_interval=100", "run.eval_interval=null")

pytestmark = pytest.mark.slow


class Cluster:
    """munged, slurmctld and slurmd of one machine, which accept jobs until `close`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        host = socket.gethostname().split(".")[0]
        for name in ("state", "spool"):
            (folder / name).mkdir()
        key = folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        (folder / "slurm.conf").write_text(
            f"""
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmctldPort={free_port()}
SlurmdPort={free_port()}
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
NodeName={host} NodeAddr=127.0.0.1 CPUs=2 State=UNKNOWN
PartitionName=main Nodes={host} Default=YES MaxTime=INFINITE State=UP
"""
        )
        self.env = ENVIRONMENT | {
            "SLURM_CONF": str(folder / "slurm.conf"),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        }
        files = [f"--{name}-file={folder}/munge.{name}" for name in ("key", "pid", "log", "seed")]
        self.processes: list[subprocess.Popen[bytes]] = []
        self._start("munged", "--force", "-F", f"--socket={folder}/munge.socket", *files)
        wait(lambda: (folder / "munge.socket").exists())
        self._start("slurmctld", "-D", "-c")
        self._start("slurmd", "-D", "-N", host)
        wait(lambda: "idle" in self.run("sinfo", "--noheader", "--format=%T"))

    def _start(self, *command: str) -> None:
        with open(self.folder / f"{command[0]}.out", "wb") as out:
            self.processes.append(subprocess.Popen(command, env=self.env, stdout=out, stderr=out))

    def run(self, *command: str) -> str:
        return subprocess.run(
            command, cwd=ROOT, env=self.env, capture_output=True, text=True, timeout=60
        ).stdout.strip()

    def submit(self, workspace: Workspace, name: str, nproc: int) -> str:
        """`sbatch deploy/slurm.sh` for a training of the workspace's project; the job's number."""
        flags = workspace.command(f"run.output_dir={workspace.path}/{name}", *OPTIONS, nproc=nproc)[2:]
        output = f"--output={self.folder}/%j.log"
        return self.run("sbatch", "--parsable", "--nodes=1", output, str(ROOT / "deploy" / "slurm.sh"), *flags)

    def log(self, job: str) -> str:
        path = self.folder / f"{job}.log"
        return path.read_text() if path.exists() else ""

    def state(self, job: str) -> str:
        shown = self.run("scontrol", "show", "job", job)
        return next((word.partition("=")[2] for word in shown.split() if word.startswith("JobState=")), "")

    def close(self) -> None:
        self.run("scancel", "--user=root")
        for process in reversed(self.processes):
            process.terminate()
            process.wait(timeout=60)


def wait(condition: Callable[[], bool], seconds: float = 240) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.1)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing or os.geteuid() != 0:
        pytest.skip(f"needs root and Debian's slurm-wlm and munge (missing: {', '.join(missing) or 'root'})")
    made = Cluster(tmp_path_factory.mktemp("slurm"))
    yield made
    made.close()


def test_a_job_trains_and_ends(cluster: Cluster, shared_workspace: Workspace) -> None:
    job = cluster.submit(shared_workspace, "plain", nproc=1)
    wait(lambda: cluster.state(job) not in ("PENDING", "RUNNING", "COMPLETING"))
    assert cluster.state(job) == "COMPLETED", cluster.log(job)
    assert logged_step(shared_workspace.path / "plain") == STEPS


@pytest.mark.parametrize("nproc", [1, 2])
def test_a_preempted_job_saves_queues_again_and_goes_on(
    cluster: Cluster, shared_workspace: Workspace, nproc: int
) -> None:
    name = f"preempted{nproc}"
    folder = shared_workspace.path / name
    job = cluster.submit(shared_workspace, name, nproc)
    wait(lambda: logged_step(folder) >= 30 or "FAILED" in cluster.state(job))
    assert cluster.run("scancel", "--signal=USR1", job) == ""
    wait(lambda: "stopped at step" in cluster.log(job))
    stopped = int(cluster.log(job).partition("stopped at step ")[2].split(";")[0])
    assert stopped < STEPS, "it was over before the signal"
    assert (folder / "checkpoints" / f"step_{stopped:06d}").is_dir()
    wait(lambda: f"at step {stopped} (sample" in cluster.log(job))
    assert "Restarts=1" in cluster.run("scontrol", "show", "job", job)
    wait(lambda: cluster.state(job) not in ("PENDING", "RUNNING", "COMPLETING"))
    assert cluster.state(job) == "COMPLETED", cluster.log(job)

    run = Run(folder)
    undisturbed = shared_workspace.train(f"undisturbed{nproc}", *OPTIONS, nproc=nproc)
    assert numbers(run) == numbers(undisturbed)
    assert_same_weights(run.checkpoint(STEPS), undisturbed.checkpoint(STEPS))


def test_what_the_launch_verb_prints_trains(cluster: Cluster, shared_workspace: Workspace) -> None:
    folder = shared_workspace.path
    words = ("--to", "slurm", "--name", "submitted", "--cfg-path", str(shared_workspace.project))
    made = subprocess.run(
        [sys.executable, "-m", "crosstrain", "launch", *words, "--options", *OPTIONS, "run.output_dir=submitted"],
        cwd=folder,
        env=cluster.env,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert made.returncode == 0, made.stderr
    (folder / "submitted.sh").write_text(made.stdout)
    job = cluster.run("sbatch", "--parsable", f"--chdir={folder}", str(folder / "submitted.sh")).strip()
    wait(lambda: cluster.state(job) not in ("PENDING", "RUNNING", "COMPLETING"))
    log = (folder / f"submitted-{job}.log").read_text()
    assert cluster.state(job) == "COMPLETED", log
    assert logged_step(folder / "submitted") == STEPS


def test_a_job_that_cannot_train_fails_and_stays_so(cluster: Cluster, shared_workspace: Workspace) -> None:
    job = cluster.submit(shared_workspace, "mistaken", nproc=3)  # on which a batch of 8 cannot be spread
    wait(lambda: cluster.state(job) not in ("PENDING", "RUNNING", "COMPLETING"))
    assert cluster.state(job) == "FAILED"
    assert "error: run.global_batch_size: 8 is not a multiple of 12" in cluster.log(job)
