"""A hundred SIGKILLs for each runner, most of them while it saves: nothing that was finished is ever lost."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

from conftest import Run, Workspace, kill
from crosstrain.checkpoint import folders
from fixtures_kill import INTERVALS, SLOW_MODEL, numbers, workers
from fixtures_processes import Training

KILLS = int(os.environ.get("CROSSTRAIN_STORM_KILLS", "100"))
LAUNCHED = 2  # kills of workers that the program's own launcher started
STEPS = 40


def unfinished(folder: Path) -> set[str]:
    return {path.name for path in (folder / "checkpoints").glob(".step_*.tmp")}


def complete(folder: Path) -> set[str]:
    return {path.name for path in (folder / "checkpoints").glob("step_*")}


def assert_same_state(a: Path, b: Path) -> None:
    """Weights and moments, bit for bit."""
    names = sorted(path.name for path in a.glob("*.safetensors"))
    assert names == sorted(path.name for path in b.glob("*.safetensors"))
    for name in names:
        left, right = load_file(a / name), load_file(b / name)
        assert left.keys() == right.keys()
        assert all(left[key].equal(right[key]) for key in left), f"{b / name} differs"


class Storm:
    """Kills of one runner, in as many runs as it takes."""

    def __init__(self, workspace: Workspace, options: tuple[str, ...], rng: random.Random) -> None:
        self.workspace, self.options, self.rng = workspace, options, rng
        self.kills = self.in_a_save = self.runs = 0

    def run(self) -> Path:
        """One run, killed until the storm is over, to its end."""
        self.runs += 1
        name = f"run{self.runs}"
        while not self._life(Training(self.workspace, name, *self.options, size=2)):
            pass
        return self.workspace.path / name

    def _life(self, life: Training) -> bool:
        """One start, killed if the storm is not over; whether it came to its end."""
        folder, ranks = life.folder, life.ranks
        if self.kills < KILLS and (saving := self._await_moment(life)) is not None:
            before = complete(folder)
            first = self.rng.sample(ranks, self.rng.choice((1, 2)))
            for rank in first:
                rank.kill()
            saving &= unfinished(folder)
            time.sleep(self.rng.choice((0.0, 0.0, 0.3)))  # in which a rank that is left may go on
            for rank in ranks:
                rank.kill()
                rank.join()
            self.kills += 1
            self.in_a_save += bool(saving)
            assert complete(folder) >= before, "a finished checkpoint is gone"
            newest, damaged = folders.newest_valid(folder / "checkpoints")
            assert damaged == []
            assert (newest.name if newest else "") >= max(before, default="")
            return False
        code = life.end(120)
        assert code == 0, life.said
        return True

    def _await_moment(self, life: Training) -> set[str] | None:
        """Wait until it is time to kill; returns the saves under way then, or None if the run ends before."""
        known, started = unfinished(life.folder), time.monotonic()
        in_a_save, patience = self.rng.random() < 0.8, self.rng.uniform(0, 4)
        while all(rank.is_alive() for rank in life.ranks):
            if in_a_save and unfinished(life.folder) - known:
                time.sleep(self.rng.uniform(0, 0.2))
                return unfinished(life.folder) - known
            if not in_a_save and time.monotonic() > started + patience:
                return unfinished(life.folder) - known
            known &= unfinished(life.folder)  # what an earlier life left goes when this one begins
            assert time.monotonic() < started + 120, life.said
            time.sleep(0.002)
        return None


def _kill_launched(workspace: Workspace, name: str, options: tuple[str, ...], rng: random.Random) -> None:
    """A start through the launcher, of which a worker, or everything, is killed while it saves."""
    folder = workspace.path / name
    known = unfinished(folder)
    process = workspace.start(name, *options, nproc=2)
    while not unfinished(folder) - known:
        known &= unfinished(folder)  # what an earlier start left goes when this one begins
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.002)
    before = complete(folder)
    os.kill(rng.choice(workers(process.pid)), signal.SIGKILL) if rng.random() < 0.5 else kill(process)
    out = process.communicate(timeout=120)[0]
    assert process.returncode in (1, -signal.SIGKILL), out
    assert complete(folder) >= before


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("runner", ["ddp", "zero2", "fsdp", "megatron_tp2"])
def test_a_storm_of_kills(workspace: Workspace, runner: str) -> None:
    seed = int(os.environ.get("CROSSTRAIN_KILL_SEED") or random.SystemRandom().randrange(10**6))
    print(f"CROSSTRAIN_KILL_SEED={seed} draws the same kills")
    (workspace.path / "plugins").mkdir()
    (workspace.path / "plugins" / "slow.py").write_text(SLOW_MODEL.replace("1.0", "0.4"))
    model = json.dumps(workspace.config["model"] | {"arch": "slow_to_save"})
    options = (
        *INTERVALS, f"run.plugins=[{workspace.path}/plugins]", f"model={model}", f"run.runner={runner}",
        "run.keep_last=null", f"run.max_iters={STEPS}",
    )  # fmt: skip
    undisturbed = Training(workspace, "undisturbed", *options, size=2)
    assert undisturbed.end(120) == 0, undisturbed.said
    expected = Run(undisturbed.folder)
    storm = Storm(workspace, options, random.Random(seed))
    for _ in range(min(LAUNCHED, KILLS // 10)):
        _kill_launched(workspace, "run1", options, storm.rng)
    while storm.kills < KILLS:
        run = Run(storm.run())
        assert numbers(run) == numbers(expected), f"{run.folder.name}, seed {seed}"
        assert complete(run.folder) == complete(expected.folder)
        for name in complete(run.folder):
            assert_same_state(expected.folder / "checkpoints" / name, run.folder / "checkpoints" / name)
        print(f"{runner}: {storm.kills} kills, {storm.in_a_save} in a save, {storm.runs} runs, none lost", flush=True)
    assert 2 * storm.in_a_save >= storm.kills
