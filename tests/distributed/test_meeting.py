"""Ranks of srun, mpirun, torchrun or deepspeed say whom they wait for, leave when told, and name a port in use."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from conftest import ENVIRONMENT, ROOT, Workspace, kill, wait_until
from fixtures_ranks import free_port, mostly_slow

PLAIN = {name: value for name, value in ENVIRONMENT.items() if not name.startswith(("SLURM_", "OMPI_", "PMI"))}


def slurm(rank: int, port: int) -> dict[str, str]:
    return {
        "SLURM_JOB_ID": str(port - 20000),
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
        "SLURM_STEP_NODELIST": "localhost",
    }


def mpi(rank: int, port: int) -> dict[str, str]:
    return {
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_LOCAL_RANK": str(rank),
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
        "MASTER_PORT": str(port),
    }


def torch(rank: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "WORLD_SIZE": "2",
        "LOCAL_RANK": str(rank),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


LAUNCHERS = {"srun": slurm, "mpirun": mpi, "torchrun": torch}


def port_for_slurm() -> int:
    """A free port that a job's number gives."""
    while not 20000 < (port := free_port()) < 30000:
        with socket.socket() as probe:
            port = 20000 + os.getpid() % 5000 + int(time.monotonic() * 1000) % 5000
            if probe.connect_ex(("127.0.0.1", port)):
                return port
    return port


class Rank(subprocess.Popen[str]):
    """A rank's process, whose words go to a file."""

    def __init__(self, workspace: Workspace, launcher: str, rank: int, port: int) -> None:
        self.words = workspace.path / f"rank{rank}.txt"
        command = workspace.command("run.output_dir=out", "run.max_iters=2")
        command.remove("--nproc-per-node")
        command.remove("1")
        environment = PLAIN | {"GLOO_SOCKET_IFNAME": "lo"} | LAUNCHERS[launcher](rank, port)
        with open(self.words, "w") as file:
            super().__init__(
                command,
                cwd=workspace.path,
                env=environment,
                stdout=file,
                stderr=file,
                text=True,
                start_new_session=True,
            )

    @property
    def said(self) -> str:
        return self.words.read_text()


@contextmanager
def ranks(workspace: Workspace, launcher: str, *numbers: int, port: int) -> Iterator[list[Rank]]:
    started = [Rank(workspace, launcher, number, port) for number in numbers]
    try:
        yield started
    finally:
        for rank in started:
            kill(rank)


def few(cases: list[tuple], quick: list[tuple]) -> list:
    """Cases of which only the quick ones run every time."""
    return [pytest.param(*case, marks=[] if case in quick else pytest.mark.slow) for case in cases]


CASES = [(launcher, rank, number) for launcher in LAUNCHERS for rank in (0, 1) for number in ("SIGTERM", "SIGINT")]


@pytest.mark.parametrize(("launcher", "rank", "number"), few(CASES, []))
def test_a_rank_without_the_others_says_so_and_leaves_when_told(
    workspace: Workspace, launcher: str, rank: int, number: str
) -> None:
    port = port_for_slurm()
    with ranks(workspace, launcher, rank, port=port) as (process,):
        wait_until(lambda: "is waiting for" in process.said, process)
        host = "localhost" if launcher == "srun" else "127.0.0.1"
        assert re.search(
            rf"rank {rank} of 2 on \S+ is waiting for ranks \[{1 - rank}\] at {host}:{port}, ", process.said
        )
        told = time.monotonic()
        process.send_signal(signal.Signals[number])
        assert process.wait(5) != 0
        assert time.monotonic() - told < 5
        assert "Traceback" not in process.said
    assert not (workspace.path / "out").exists()


@contextmanager
def another_program(port: int, answers: bool) -> Iterator[None]:
    """Something that has the port: it accepts connections and is silent, or hangs up."""
    with closing(socket.create_server(("", port), backlog=50)) as server:
        kept: list[socket.socket] = []

        def serve() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                kept.append(connection)
                if answers:
                    connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                    connection.close()

        threading.Thread(target=serve, daemon=True).start()
        yield
        for connection in kept:
            connection.close()


@pytest.mark.parametrize(
    ("launcher", "answers"),
    few([(launcher, answers) for launcher in LAUNCHERS for answers in (False, True)], []),
)
def test_a_port_in_use_ends_every_rank_in_a_sentence(workspace: Workspace, launcher: str, answers: bool) -> None:
    port = port_for_slurm()
    with another_program(port, answers), ranks(workspace, launcher, 0, 1, port=port) as both:
        assert [rank.wait(120) for rank in both] == [1, 1]
        for rank, said in zip(both, (f"{port} is in use on", "is not rank 0 of this run"), strict=True):
            errors = [line for line in rank.said.splitlines() if line.startswith("error: ")]
            assert len(errors) == 1, rank.said
            assert "MASTER_PORT: " in errors[0]
            assert said in errors[0]
            assert "set MASTER_PORT to a free port" in errors[0]
            assert "Traceback" not in rank.said
            assert "DistNetworkError" not in rank.said


@pytest.mark.slow
def test_the_store_of_a_different_job_is_none_of_ours(workspace: Workspace) -> None:
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
    store.set("job 99 0    ", "")
    with ranks(workspace, "mpirun", 1, port=store.port) as (rank,):
        assert rank.wait(120) == 1
        assert "is not rank 0 of this run; set MASTER_PORT to a free port" in rank.said


@pytest.mark.parametrize("launcher", mostly_slow(LAUNCHERS, []))
def test_ranks_that_come_late_train(workspace: Workspace, launcher: str) -> None:
    port = port_for_slurm()
    with ranks(workspace, launcher, 1, port=port) as (late,):
        wait_until(lambda: "is waiting for ranks [0] at" in late.said, late)
        with ranks(workspace, launcher, 0, port=port) as (first,):
            assert (first.wait(200), late.wait(60)) == (0, 0), first.said + late.said
            assert "runner ddp on 2 cpu worker(s)" in first.said


@pytest.mark.slow
def test_variables_that_are_missing_are_named(workspace: Workspace) -> None:
    environment = PLAIN | {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
    command = [word for word in workspace.command("run.output_dir=out") if word not in ("--nproc-per-node", "1")]
    done = subprocess.run(command, cwd=workspace.path, env=environment, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr.count("error: MASTER_ADDR, MASTER_PORT: set them")) == (1, 1), done.stderr


# ---- launchers that hand the program a flag


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("how", ["deepspeed", "torch.distributed.launch"])
def test_programs_that_pass_the_local_rank_start_train_and_evaluate(workspace: Workspace, how: str) -> None:
    port = str(free_port())
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = PLAIN | {"GLOO_SOCKET_IFNAME": "lo", "DS_ACCELERATOR": "cpu", "PATH": path}
    if how == "deepspeed":
        start = ["deepspeed", "--num_gpus=2", f"--master_port={port}"]
    else:
        start = [sys.executable, "-m", how, "--nproc-per-node=2", f"--master-port={port}"]
    for script, arguments in (
        ("train.py", ["--cfg-path", str(workspace.project), "--options", "run.output_dir=out", "run.max_iters=2"]),
        ("evaluate.py", ["--checkpoint", "out", "--splits", "val"]),
    ):
        done = subprocess.run(
            [*start, str(ROOT / script), *arguments],
            cwd=workspace.path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=280,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert "runner ddp on 2 cpu worker(s)" in done.stdout or script == "evaluate.py"
    assert (workspace.path / "out" / "checkpoints" / "step_000002").is_dir()


@pytest.mark.parametrize("flag", ["--local_rank=0", "--local-rank=1", "--local_rank 3"])
@pytest.mark.parametrize("verb", ["train", "evaluate"])
def test_the_local_rank_is_taken(verb: str, flag: str) -> None:
    from crosstrain.cli.main import parse

    needed = {"train": ["--cfg-path", "p.yaml"], "evaluate": ["--checkpoint", "c"]}[verb]
    assert parse([verb, *flag.split(), *needed]).run is not None
