"""Kill workers of a run that goes on without them, let new ones join, and count what was lost.

    python benchmarks/storm.py [--ranks 8 16 32 64] [--changes 200] [--seed 0]

The launcher, the rendezvous, the groups and the agreement on a new epoch are those of training with
`run.on_lost_rank=continue`. A step is simulated: each rank takes its share of the step's sample numbers, and one
all-reduce adds them. The total of every finished step is checked, so a lost or repeated sample is found. A storm kills
random workers, and each is replaced, until there were `changes` losses and arrivals. Prints a table with the seconds
from a kill to the end of the next step, for each number of ranks.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import threading
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import torch
import torch.distributed as dist
from common import table

from crosstrain.distributed.launch import membership
from crosstrain.distributed.launch.launch import Launch
from crosstrain.distributed.launch.launcher import environment
from crosstrain.distributed.launch.local_workers import LocalWorkers
from crosstrain.distributed.launch.members import Members
from crosstrain.distributed.launch.membership import Membership, ends_only_the_epoch

BATCH = 4096  # samples in a step
COMPUTE = 0.05  # seconds that a rank's part of a step takes
CALM = 2  # finished steps with all ranks between two kills
LIMIT = 120.0  # seconds until a worker counts as hanging
STORM = "storm"  # file whose existence keeps the run going


def work(folder: Path) -> int:
    """Run on each rank: simulate steps until the storm is over."""
    rank, member = Rank(folder), membership.current
    assert member is not None
    while True:
        epoch = member.enter()
        try:
            store = dist.TCPStore(epoch.address, epoch.port, timeout=timedelta(seconds=LIMIT))
            dist.init_process_group("gloo", store=store, rank=epoch.rank, world_size=epoch.size)
            over = rank.simulate(member)
        except Exception as error:
            if not ends_only_the_epoch(error):
                raise
            over = False
        with suppress(Exception):
            dist.destroy_process_group()
        if over:
            return 0


class Rank:
    """A rank that simulates steps. It writes a line for each finished step, and rank 0 writes it to `steps`, too."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.step = folder, 0  # number of finished steps

    def simulate(self, member: Membership) -> bool:
        """Simulate steps until the end of the epoch; return True if the storm is over."""
        rank, size = dist.get_rank(), dist.get_world_size()
        first = torch.tensor(self.step)  # a rank may have missed the end of the last step; a new one knows nothing
        dist.all_reduce(first, dist.ReduceOp.MAX)
        self.step = int(first)
        while True:
            samples = range(self.step * BATCH + rank, (self.step + 1) * BATCH, size)
            wishes = member.ends_epoch, rank == 0 and not (self.folder / STORM).exists()
            time.sleep(COMPUTE)
            sums = torch.tensor([sum(samples), len(samples), *map(int, wishes)])
            dist.all_reduce(sums)
            total, count, ends, over = sums.tolist()
            assert (total, count) == (sum(range(self.step * BATCH, (self.step + 1) * BATCH)), BATCH)
            self.step += 1
            for name in [f"rank_{os.getpid()}", *["steps"] * (rank == 0)]:
                with (self.folder / name).open("a") as file:
                    file.write(f"{self.step} {member.epoch.number} {size} {time.monotonic()}\n")
            if over or ends:
                return bool(over)


class Finished(NamedTuple):
    """A line of a finished step."""

    step: int
    epoch: int
    ranks: int
    end: float  # on the monotonic clock


def finished_steps(file: Path) -> list[Finished]:
    """Return the finished steps; the last line may be half written, and is left out."""
    lines = file.read_text().split("\n")[:-1] if file.exists() else []
    rows = [line.split() for line in lines]
    return [Finished(int(row[0]), int(row[1]), int(row[2]), float(row[3])) for row in rows]


class Storm:
    """Kills workers of a run in this process, and measures how long the others need."""

    def __init__(self, members: Members, folder: Path, ranks: int, changes: int, seed: int) -> None:
        self._members, self._folder, self._ranks, self._kills = members, folder, ranks, changes // 2
        self._random = random.Random(seed)
        self.seconds = list[float]()  # from a kill to the end of the next step of the others
        self.arrivals = list[float]()  # from a kill to the end of the first step with all ranks again

    def blow(self) -> None:
        """Run in a thread beside the launcher."""
        calm = self._wait(0, all_ranks=True)
        for _ in range(self._kills):
            slot = self._random.choice([s for s, w in self._members._workers.items() if w.heard != float("inf")])
            worker = self._members._local.running[slot].process.pid
            assert worker is not None
            killed = time.monotonic()
            os.kill(worker, signal.SIGKILL)
            self.seconds.append(self._wait(calm.epoch, all_ranks=False).end - killed)
            calm = self._wait(calm.epoch, all_ranks=True)
            self.arrivals.append(calm.end - killed)
        (self._folder / STORM).unlink()

    def _wait(self, epoch: int, all_ranks: bool) -> Finished:
        """Wait for a step after `epoch`, or for `CALM` steps of all ranks in a later epoch; return the first one.

        Many ranks need longer to form groups than a new worker needs to start, so the first step may have all ranks.
        """
        while True:
            steps = finished_steps(self._folder / "steps")
            later = [step for step in steps if step.epoch > epoch and (step.ranks == self._ranks or not all_ranks)]
            if len(later) >= (CALM if all_ranks else 1):
                return later[0]
            time.sleep(0.02)


def run(ranks: int, changes: int, seed: int) -> list[str]:
    """Run one storm; return a row of the table."""
    with TemporaryDirectory(prefix="storm-") as temporary:
        folder = Path(temporary)
        (folder / STORM).touch()
        how = Launch(ranks, True, False, True, max_restarts=changes)
        local = LocalWorkers(work, (folder,), how, goes_on=True)
        members = Members(local, how, [], range(1, ranks + 1), LIMIT)
        storm = Storm(members, folder, ranks, changes, seed)
        thread = threading.Thread(target=storm.blow, daemon=True)
        thread.start()
        with environment(how):
            code = members.exit_code()
        thread.join(LIMIT)
        of_ranks = [[line.step for line in finished_steps(path)] for path in folder.glob("rank_*")]
    finished = {step for steps in of_ranks for step in steps}
    repeated = sum(len(steps) - len(set(steps)) for steps in of_ranks)
    assert code == 0
    times = statistics.median(storm.seconds), max(storm.seconds), statistics.median(storm.arrivals)
    counts = ranks, 2 * len(storm.seconds), len(finished), repeated, max(finished) - len(finished)
    return [*map(str, counts), *(f"{seconds:.2f}" for seconds in times)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 16, 32, 64])
    parser.add_argument("--changes", type=int, default=200, help="losses and arrivals of the largest; others have 20")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    titles = [
        "ranks", "losses and arrivals", "steps", "repeated", "missing", "s to go on, median", "worst",
        "s until all ranks, median",
    ]  # fmt: skip
    rows = []
    for ranks in given.ranks:
        rows.append(run(ranks, given.changes if ranks == max(given.ranks) else 20, given.seed))
        print(table(titles, rows), flush=True)


if __name__ == "__main__":
    main()
