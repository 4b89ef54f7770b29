"""`crosstrain drill`: faults of workers cost repeated steps, and nothing else."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import ENVIRONMENT, Workspace
from fixtures_ranks import mostly_slow

RUNNERS = ["ddp", "fsdp", "zero2", "zero3", "megatron_tp2", "megatron_pp2", "{name: diloco, every: 3}"]


def drill(workspace: Workspace, folder: Path, *flags: str, runner: str) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "crosstrain",
        "drill",
        "--cfg-path",
        str(workspace.project),
        "--output",
        str(folder),
    ]
    return subprocess.run(
        [*command, *flags, "--options", f"run.runner={runner}", "run.global_batch_size=8", "run.micro_batch_size=2"],
        env=ENVIRONMENT, capture_output=True, text=True, timeout=500, cwd=workspace.path,
    )  # fmt: skip


@pytest.mark.parametrize("runner", mostly_slow(RUNNERS, []))
def test_a_killed_worker_costs_a_few_steps(workspace: Workspace, runner: str) -> None:
    done = drill(
        workspace, workspace.path / "drill", "--faults", "kill", "--count", "1", "--steps", "20", runner=runner
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.search(r"^kill +(\d+) +(\d+) +([\d.]+)  rank [01] was killed by SIGKILL$", done.stdout, re.MULTILINE)
    assert found, done.stdout
    assert int(found[2]) <= int(found[1])
    assert "the same samples, losses and final weights, bit for bit" in done.stdout


@pytest.mark.slow
def test_every_fault_is_named(workspace: Workspace) -> None:
    done = drill(workspace, workspace.path / "drill", "--count", "5", "--steps", "300", runner="ddp")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = {line.split()[0]: line for line in done.stdout.splitlines()[1:6]}
    assert lines.keys() == {"kill", "freeze", "slow", "close", "cut"}
    assert "was killed by SIGKILL" in lines["kill"]
    assert re.search("rank [01] (never entered|did not answer)", lines["freeze"])
    assert float(lines["freeze"].split()[3]) < 45, "a stopped process does not keep the others for 30 s more"
    assert "rank" in lines["close"]
    assert re.search("rank [01] .*lost its connection", lines["cut"])


def test_mistakes_are_refused(workspace: Workspace) -> None:
    done = drill(workspace, workspace.path, runner="ddp")
    assert (done.returncode, "already exists" in done.stderr) == (1, True)
    done = drill(workspace, workspace.path / "drill", "--count", "9", "--steps", "10", runner="ddp")
    assert (done.returncode, "9 faults need at least 18 steps" in done.stderr) == (1, True)
