"""Kill ranks of a run under fsdp with two copies of the model, and compare it with a planned change of ranks.

    python benchmarks/lost_shards.py [--kills 30] [--seed 0]

Four ranks hold two copies of the model. A random rank is killed again and again; two ranks go on, and a new worker
makes them four again. Prints the seconds from a kill to the end of the next step, and how often the ranks' memory
did not hold the whole state, so that the newest checkpoint was loaded. Then the same changes of ranks are made by
stopping and resuming, and the weights of both runs are compared, bit for bit.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

from common import ROOT
from forks import train
from tiny import GPT2, write_data, write_project

from conftest import logged_step
from crosstrain.checkpoint.digests import digests
from crosstrain.checkpoint.files import Reader
from crosstrain.checkpoint.folders import find_checkpoint
from fixtures_kill import workers

RANKS = 4
RUN = {
    "runner": {"name": "fsdp", "shard_size": 2}, "global_batch_size": 8, "micro_batch_size": 1, "log_interval": 1,
    "save_interval": 50, "keep_last": 1, "init_lr": 1e-3, "lr_sched": "constant", "max_iters": 1,
    "collective_timeout": 20, "device": "cpu",
}  # fmt: skip
CALM = 3  # steps of all ranks between two kills


def changes(folder: Path) -> list[tuple[int, int]]:
    """Return (ranks, step from which they go on) of each change."""
    log = (folder / "log.txt").read_text() if (folder / "log.txt").exists() else ""
    return [(int(ranks), int(step)) for ranks, step in re.findall(r"; (\d+) ranks go on from step (\d+)", log)]


def wait_for(process: subprocess.Popen[bytes], folder: Path, step: int, ranks: int | None) -> None:
    """Wait until a step is complete, with this number of ranks (None: any)."""
    while logged_step(folder) < step or (ranks and changes(folder) and changes(folder)[-1][0] != ranks):
        if process.poll() is not None:
            raise SystemExit(f"the run ended; see {folder}.log")
        time.sleep(0.01)


def storm(project: Path, folder: Path, kills: int, rng: random.Random) -> list[float]:
    """Train with kills, stop the run with a signal, and return the seconds of each kill."""
    options = [f"run.output_dir={folder}", "run.on_lost_rank=continue", f"run.max_restarts={kills}"]
    options.append("run.max_iters=100000")
    command = [sys.executable, str(ROOT / "train.py"), "--cfg-path", str(project), "--nproc-per-node", str(RANKS)]
    log, seconds = folder.with_suffix(".log").open("wb"), []
    process = subprocess.Popen([*command, "--options", *options], stdout=log, stderr=log)
    try:
        wait_for(process, folder, 10, None)
        for _ in range(kills):
            time.sleep(rng.random())
            before, killed = logged_step(folder), time.monotonic()
            os.kill(rng.choice(workers(process.pid)), signal.SIGKILL)
            known = len(changes(folder))
            while len(changes(folder)) == known and process.poll() is None:
                time.sleep(0.01)
            wait_for(process, folder, min(before, changes(folder)[known][1]) + 1, None)
            seconds.append(time.monotonic() - killed)
            wait_for(process, folder, changes(folder)[-1][1], RANKS)
            wait_for(process, folder, changes(folder)[-1][1] + CALM, RANKS)
        process.terminate()
        process.wait(120)
    finally:
        process.kill()
    return seconds


def planned(project: Path, folder: Path, made: list[tuple[int, int]], last: int) -> None:
    """Train with the same changes of ranks, by stopping and resuming."""
    history = list[tuple[int, int]]()
    for change in made:
        history = [earlier for earlier in history if earlier[1] <= change[1]] + [change]  # steps that still count
    ranks = RANKS
    for following, step in [*history, (RANKS, last)]:
        if step:
            options = [f"run.output_dir={folder}", f"run.max_iters={step}", "run.save_interval=null"]
            train(project, options, ranks)
        ranks = following


def first_difference(*folders: Path) -> int | None:
    """Return the first step with different losses."""
    losses = [
        {row["step"]: row["loss"] for row in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())}
        for folder in folders
    ]
    return next((step for step, loss in losses[0].items() if losses[1].get(step) != loss), None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        project = write_project(folder / "project.yaml", GPT2, write_data(folder)["text"], RUN)
        seconds = storm(project, folder / "storm", given.kills, random.Random(given.seed))
        made = changes(folder / "storm")
        reader = Reader.open(find_checkpoint(folder / "storm"))
        last = logged_step(folder / "storm")
        lost = sum(later <= earlier for (_, earlier), (_, later) in pairwise(made))
        planned(project, folder / "planned", made, last)
        apart = first_difference(folder / "storm", folder / "planned")
        same = digests(reader) == digests(Reader.open(find_checkpoint(folder / "planned")))
    median, worst = statistics.median(seconds), max(seconds)
    print(f"{len(seconds)} kills in {last} steps; to the next step: {median:.1f} s (median), {worst:.1f} s (worst)")
    print(f"the newest checkpoint was loaded {lost} times")
    said = "equal to" if same else f"DIFFERENT (from step {apart} on) from"
    print(f"weights and moments are {said} those of the planned changes")


if __name__ == "__main__":
    main()
