"""Fifty SIGKILLs at random moments: whatever is killed, every run goes on, and no finished checkpoint is lost."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from conftest import Run, Workspace, kill, logged_step
from crosstrain.checkpoint import folders
from fixtures_kill import INTERVALS, SLOW_MODEL, assert_same_weights, numbers, workers

KILLS = 50
MOMENTS = ("start", "step", "save")
VICTIMS = ("worker", "launcher", "everything")


class Life:
    """One start of the program in a run's folder, and how it is killed."""

    def __init__(self, workspace: Workspace, folder: Path, options: tuple[str, ...], nproc: int) -> None:
        self.folder, self.checkpoints = folder, folder / "checkpoints"
        self.process = workspace.start(folder.name, *options, nproc=nproc)

    def until(self, moment: str, rng: random.Random) -> bool:
        """Wait for a moment; False if the run ends before it comes."""
        if moment == "start":
            patience = rng.uniform(0, 6)
            end = time.monotonic() + patience
            return self._wait(lambda: time.monotonic() > end)
        if moment == "step":
            step = logged_step(self.folder) + rng.randint(1, 4)
            return self._wait(lambda: logged_step(self.folder) >= step)
        before, patience = set(self._saving()), rng.uniform(0, 0.3)
        if not self._wait(lambda: bool(set(self._saving()) - before)):
            return False
        time.sleep(patience)
        return self.process.poll() is None

    def _saving(self) -> list[str]:
        return [path.name for path in self.checkpoints.glob(".step_*.tmp")]

    def _wait(self, condition: Callable[[], bool], seconds: float = 240) -> bool:
        deadline = time.monotonic() + seconds
        while self.process.poll() is None:
            if condition():
                return True
            assert time.monotonic() < deadline, "timed out"
            time.sleep(0.002)
        return False

    def complete(self) -> set[str]:
        return {path.name for path in self.checkpoints.glob("step_*")}

    def strike(self, victim: str, rng: random.Random) -> str:
        """Kill; returns what was. A worker where there is none is the launcher."""
        if victim == "worker":
            try:
                os.kill(rng.choice(workers(self.process.pid)), signal.SIGKILL)
                return victim
            except (AssertionError, ProcessLookupError):
                victim = "launcher"
        if victim == "launcher":
            os.kill(self.process.pid, signal.SIGKILL)
            self.process.wait()
        else:
            kill(self.process)
        return victim


@pytest.mark.slow
@pytest.mark.timeout(5400)
def test_fifty_random_kills(workspace: Workspace) -> None:
    seed = int(os.environ.get("CROSSTRAIN_KILL_SEED") or random.SystemRandom().randrange(10**6))
    print(f"CROSSTRAIN_KILL_SEED={seed} draws the same kills")
    rng = random.Random(seed)
    (workspace.path / "plugins").mkdir()
    (workspace.path / "plugins" / "slow.py").write_text(SLOW_MODEL)
    model = json.dumps(workspace.config["model"] | {"arch": "slow_to_save"})
    options = (*INTERVALS, f"run.plugins=[{workspace.path}/plugins]", f"model={model}", "run.keep_last=null")
    undisturbed = {n: workspace.train(f"undisturbed{n}", *options, nproc=n) for n in (1, 2)}
    done: dict[str, int] = {}
    number = 0
    while sum(done.values()) < KILLS:
        number += 1
        nproc = rng.choice((1, 2, 2))
        run = Run(workspace.path / f"run{number}")
        ended = False
        while not ended:
            restarts = rng.choice((0, 100))
            life = Life(workspace, run.folder, (*options, f"run.max_restarts={restarts}"), nproc)
            ended = _kill_until_it_is_over(life, rng, restarts > 0, done)
        assert numbers(run) == numbers(undisturbed[nproc]), f"{run.folder.name}, seed {seed}"
        assert_same_weights(run.checkpoint(20), undisturbed[nproc].checkpoint(20))
    print(f"{sum(done.values())} kills in {number} runs: {done}")


def _kill_until_it_is_over(life: Life, rng: random.Random, restarts: bool, done: dict[str, int]) -> bool:
    """Kill in one life until it ends; whether it ended well."""
    complete: set[str] = set()
    while sum(done.values()) < KILLS:
        moment, victim = rng.choice(MOMENTS), rng.choice(VICTIMS)
        if not life.until(moment, rng):
            break
        complete = life.complete()
        victim = life.strike(victim, rng)
        done[f"{victim} at {moment}"] = done.get(f"{victim} at {moment}", 0) + 1
        if victim != "worker" or not restarts:
            break
    try:
        out = life.process.communicate(timeout=240)[0]
    except subprocess.TimeoutExpired:
        kill(life.process)
        raise
    if life.process.returncode == 0:
        return True
    assert life.process.returncode in (1, -signal.SIGKILL), out
    if life.process.returncode == 1:
        assert "was killed by SIGKILL" in out, out
        assert "Traceback" not in out, out
    assert life.complete() >= complete
    if complete:
        newest, damaged = folders.newest_valid(life.checkpoints)
        assert (newest is not None, damaged) == (True, [])
        assert newest is not None
        assert newest.name >= max(complete)
    return False
