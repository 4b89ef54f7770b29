"""A launcher that is killed while its workers start leaves none of them behind."""

from __future__ import annotations

import os
import random
import signal
import time

import pytest

from conftest import Workspace, kill, session
from fixtures_ranks import mostly_slow

STARTS = 30.0  # seconds until the first step of a start, at most, on a busy machine


def _killed_after(workspace: Workspace, name: str, runner: str, seconds: float) -> list[int]:
    """Kill a launcher that many seconds after its start; returns the processes that are there 10 s later."""
    process = workspace.start(name, f"run.runner={runner}", "run.max_iters=1000000", "run.save_interval=1000", nproc=2)
    try:
        time.sleep(seconds)
        assert process.poll() is None, process.communicate()[0]
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        deadline = time.monotonic() + 10
        while (left := session(process)) and time.monotonic() < deadline:
            time.sleep(0.1)
        return left
    finally:
        kill(process)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kills", mostly_slow([2, 30], [2]))
def test_no_worker_outlives_a_launcher_that_is_killed_during_its_start(workspace: Workspace, kills: int) -> None:
    rng = random.Random(5)
    for number in range(kills):
        seconds, runner = rng.uniform(2, STARTS if kills > 2 else 12), ("zero2", "ddp")[number % 2]
        left = _killed_after(workspace, f"out{number}", runner, seconds)
        assert not left, f"{runner}, killed after {seconds:.1f} s"
