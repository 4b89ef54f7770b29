"""With `run.on_lost_rank: continue`, the machines that are left go on, and a machine that comes back joins them."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from conftest import Workspace, kill, logged_step, wait_until
from fixtures_kill import changes, dying, end_of, workers
from fixtures_nodes import Machines, finish
from fixtures_ranks import train

OPTIONS = (
    "run.global_batch_size=12", "run.micro_batch_size=1", "run.save_interval=null", "run.bitwise=true",
    "run.collective_timeout=60", "run.lr_sched=constant", "run.log_interval=5", "run.max_iters=100000",
    "run.warmup_steps=3", "run.eval_interval=null", "run.max_restarts=3", "run.on_lost_rank=continue",
)  # fmt: skip


def assert_undisturbed(folder: Path, workspace: Workspace) -> None:
    """A run that was stopped has the bits of one process that trained for the same number of steps."""
    (checkpoint,) = (folder / "checkpoints").glob("step_*")
    steps = f"run.max_iters={int(checkpoint.name.removeprefix('step_'))}"
    alone = train(workspace.project, f"undisturbed_{folder.name}", *OPTIONS, "run.on_lost_rank=restart", steps)
    assert end_of(folder) == end_of(alone.folder)


def stop(nodes: list[subprocess.Popen[str]]) -> list[str]:
    """Let the run save and end; return what the nodes have printed."""
    nodes[0].send_signal(signal.SIGTERM)
    return [finish(node, code=128 + signal.SIGTERM) for node in nodes]


@contextmanager
def started(machines: Machines, name: str, *options: str) -> Iterator[list[subprocess.Popen[str]]]:
    """Both nodes of a run, after its twentieth step."""
    nodes = [machines.start(node, name, *OPTIONS, *options) for node in range(2)]
    try:
        wait_until(lambda: logged_step(machines.workspace.path / name) >= 20, nodes[0])
        yield nodes
    finally:
        for node in nodes:
            if node.poll() is None:
                kill(node)


@pytest.mark.slow
def test_a_machine_without_network_is_left_out_and_joins_again(machines: Machines) -> None:
    folder = machines.workspace.path / "unplugged"
    with started(machines, "unplugged") as nodes:
        first = workers(nodes[0].pid)
        machines.plug(False)
        unplugged = time.monotonic()
        wait_until(lambda: len(changes(folder)) == 1, nodes[0])
        took = time.monotonic() - unplugged
        machines.plug(True)
        wait_until(lambda: len(changes(folder)) == 2, nodes[0])
        assert workers(nodes[0].pid) == first, "the same processes"
        assert "note: lost the connection to node 0; this node joins again" in stop(nodes)[1]
    lost, added = changes(folder)
    assert re.match(r"node 1 \(.+\) gave no sign of life for 3 s; 1 ranks go on from step \d+", lost)
    assert re.match(r"a worker was added; 2 ranks go on from step \d+", added)
    assert took < 30, "less than collective_timeout: nobody waits for the lost machine's connections"
    assert_undisturbed(folder, machines.workspace)


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["kill", "freeze"])
def test_a_lost_machine_is_replaced(machines: Machines, fault: str) -> None:
    folder = machines.workspace.path / fault
    with started(machines, fault) as nodes:
        processes = [nodes[1].pid, *workers(nodes[1].pid)]
        if fault == "kill":
            kill(nodes[1])
        else:
            for process in processes:
                os.kill(process, signal.SIGSTOP)
        wait_until(lambda: len(changes(folder)) == 1, nodes[0])
        if fault == "kill":
            nodes[1] = machines.start(1, fault, *OPTIONS)
        else:
            for process in processes:
                os.kill(process, signal.SIGCONT)
        wait_until(lambda: len(changes(folder)) == 2, nodes[0])
        said = stop(nodes)
    assert ("note: lost the connection to node 0; this node joins again" in said[1]) == (fault == "freeze")
    assert_undisturbed(folder, machines.workspace)


@pytest.mark.slow
def test_a_lost_node_0_is_replaced(machines: Machines) -> None:
    """The others cannot go on without the launcher that decides, so the newest checkpoint is loaded."""
    options, folder = ("run.save_interval=10", "run.keep_last=1"), machines.workspace.path / "node0"
    with started(machines, "node0", *options) as nodes:
        kill(nodes[0])
        nodes[0] = machines.start(0, "node0", *OPTIONS, *options)
        wait_until(lambda: "resuming" in (folder / "log.txt").read_text(), nodes[0])
        said = stop(nodes)
    assert "lost the connection to node 0; this node joins again" in said[1]
    assert_undisturbed(folder, machines.workspace)


@pytest.mark.slow
def test_a_killed_worker_of_another_machine_is_replaced_there(machines: Machines) -> None:
    folder = machines.workspace.path / "worker"
    with started(machines, "worker") as nodes:
        (worker,) = workers(nodes[1].pid)
        os.kill(worker, signal.SIGKILL)
        wait_until(lambda: len(changes(folder)) == 2, nodes[0])
        stop(nodes)
    assert re.match(r"rank 1 on .+ was killed by SIGKILL; 1 ranks go on from step \d+", changes(folder)[0])
    assert_undisturbed(folder, machines.workspace)


@pytest.mark.slow
def test_a_stop_signal_and_a_mistake_reach_all_machines(machines: Machines, tmp_path: Path) -> None:
    with started(machines, "stopped") as nodes:
        nodes[1].send_signal(signal.SIGTERM)
        finish(nodes[0], code=128 + signal.SIGTERM)
        finish(nodes[1], code=128 + signal.SIGTERM)
    assert (machines.workspace.path / "stopped" / "checkpoints" / "latest").exists()
    mistake = dying(tmp_path, "3:1:user")
    mistaken = [machines.start(node, "mistake", *OPTIONS, "run.bitwise=false", *mistake) for node in range(2)]
    assert sorted(finish(node, code=1).strip().splitlines()[-1] for node in mistaken) == [
        "error: another node ended the run; see its output for the reason",
        "error: the moon is in the wrong phase; wait a week",
    ]


@pytest.mark.slow
def test_a_machine_with_another_number_of_workers_is_refused(machines: Machines) -> None:
    with started(machines, "numbers", "run.max_restarts=1") as nodes:
        kill(nodes[1])
        wrong = machines.start(1, "numbers", *OPTIONS, nproc=2)
        assert finish(wrong, code=1).strip().splitlines()[-1] == (
            "error: --nproc-per-node: node 1 has 2 workers, and node 0 has 1; give the same number on each node"
        )
        nodes[1] = machines.start(1, "numbers", *OPTIONS)
        wait_until(lambda: len(changes(machines.workspace.path / "numbers")) == 2, nodes[0])
        stop(nodes)
