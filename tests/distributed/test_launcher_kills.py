"""A launcher that is killed while its workers start leaves none of them behind."""

from __future__ import annotations

import os
import signal
import subprocess
import time

import pytest

from conftest import Workspace, kill, logged_step, session, wait_until
from fixtures_ranks import mostly_slow


def _start(workspace: Workspace, name: str, runner: str) -> subprocess.Popen[str]:
    return workspace.start(name, f"run.runner={runner}", "run.max_iters=1000000", "run.save_interval=1000", nproc=2)


def _seconds_to_the_first_step(workspace: Workspace, runner: str) -> float:
    begun, process = time.monotonic(), _start(workspace, f"measured_{runner}", runner)
    try:
        wait_until(lambda: logged_step(workspace.path / f"measured_{runner}") >= 1, process, 300)
        return time.monotonic() - begun
    finally:
        kill(process)


def _left_after(workspace: Workspace, name: str, runner: str, seconds: float) -> list[int]:
    """Kill a launcher that many seconds after its start; returns the processes that stay too long."""
    process = _start(workspace, name, runner)
    try:
        time.sleep(seconds)
        assert process.poll() is None, process.communicate()[0]
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        killed = time.monotonic()
        while left := session(process):
            # Once a step is done, workers save first, which takes longer on a busy machine.
            if time.monotonic() - killed > (60 if logged_step(workspace.path / name) else 10):
                break
            time.sleep(0.1)
        return left
    finally:
        kill(process)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kills", mostly_slow([30], []))
def test_no_worker_outlives_a_launcher_that_is_killed_during_its_start(workspace: Workspace, kills: int) -> None:
    runners = ("zero2", "ddp")
    last = {runner: _seconds_to_the_first_step(workspace, runner) if kills > 2 else 10.0 for runner in runners}
    for number in range(kills):
        runner = runners[number % 2]
        seconds = 1 + (last[runner] - 1) * (number + 0.5) / kills  # spread evenly over the start
        left = _left_after(workspace, f"out{number}", runner, seconds)
        assert not left, f"{runner}, killed after {seconds:.1f} s"
