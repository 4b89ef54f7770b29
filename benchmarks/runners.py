"""Compare runners with the engines that they drive: training steps, saves during training, save and load bandwidth.

    python benchmarks/runners.py [--parts step save bandwidth] [--runners zero1 zero2 zero3 fsdp] [--device cpu]

Step: the platform, as its users run it, is compared with a bare loop that calls the engine directly. Both have the same
model class, loss, optimizer, engine options, gradient clipping and accumulation. Every rank holds both, each with its
own model. They alternate every step, in changing order, so that both have the same memory, threads and neighbours.
The watchdog is off while the bare loop runs. (--turn makes turns longer, because on a GPU each turn ends with a wait
for the device.) The table shows the median ratio of adjacent turns, with its 95 % confidence interval, and the ratio of
the total times, including the log line of every tenth step. With --control, the bare loop takes both turns, to measure
the noise.

Save: both sides have their own processes, and one side is stopped while the other runs. A turn is a number of steps,
with or without saves. When the clock stops, the platform's checkpoints are on disk, hashed and flushed; the files of
DeepSpeed's `save_checkpoint` are still in memory.

Bandwidth: `Checkpointer.save` and `wait` are compared with plain files of the same size, one per rank. Each file is
written at once, flushed and renamed to replace the previous file, as a new checkpoint replaces the last one.
`load_shards` is compared with `readinto` of the same number of bytes per rank, from the page cache and after eviction
from it. In a virtual machine, the cache of the host is not evicted.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from common import Result, Sizes, interval, ratio, rounds, table, write_project
from engines import Order, direct, platform
from storage import storage
from turns import Contestant

WARM_UP = 3  # turns


class Benchmark:
    """The parts of the benchmark, for the given command line."""

    def __init__(self, arguments: argparse.Namespace, folder: Path) -> None:
        self.arguments, self.folder = arguments, folder
        sizes = Sizes(*(getattr(arguments, name) for name in vars(Sizes())))
        run = {
            "output_dir": str(folder), "max_iters": 10**6, "micro_batch_size": arguments.micro_batch,
            "device": arguments.device,
            "collective_timeout": 1e6,  # the watchdog is on, but a rank is stopped while others run
        }  # fmt: skip
        self.project = write_project(folder, sizes, run)

    @contextmanager
    def contestants(self, *works: Callable[..., None], **run: Any) -> Iterator[list[Contestant]]:
        """Yield a contestant for each of `works`, with options of the section `run`; their folders are temporary."""
        env = {"OMP_NUM_THREADS": str(self.arguments.threads), "DS_ACCELERATOR": self.arguments.device}
        alive: list[Contestant] = []
        with tempfile.TemporaryDirectory(dir=self.folder) as folder:
            try:
                for i, work in enumerate(works):
                    options = [f"run.{key}={value}" for key, value in run.items()] + [f"run.output_dir={folder}/{i}"]
                    alive.append(Contestant(work, str(self.project), options, ranks=self.arguments.ranks, env=env))
                yield alive
            finally:
                for contestant in alive:
                    contestant.close()

    # ---- the three parts

    def step(self) -> str:
        """Return the table of step times, platform / bare loop."""
        rows = []
        for precision, accumulation, runner in product(
            self.arguments.precisions, self.arguments.accumulations, self.arguments.runners
        ):
            ours, theirs = list[float](), list[float]()
            for _ in range(self.arguments.launches):
                for a, b in self._pairs(runner=runner, amp=precision, accum_grad_iters=accumulation):
                    ours.append(a)
                    theirs.append(b)
                pairs = [a / b for a, b in zip(ours, theirs, strict=True)]
                last = slice(-self.arguments.pairs, None)
                times = [f"{statistics.median(side[last]) / self.arguments.turn:.4f} s" for side in (ours, theirs)]
                print(runner, precision, accumulation, interval(pairs[last]), *times, file=sys.stderr, flush=True)
            rows.append([runner, precision, accumulation, interval(pairs), f"{sum(ours) / sum(theirs):.3f}"])
        sides = "bare loop / bare loop" if self.arguments.control else "platform / engine only"
        return table(["runner", "precision", "accumulation", f"step time, {sides}", "all steps"], rows)

    def _pairs(self, **run: Any) -> Iterator[tuple[float, float]]:
        """Yield the seconds of adjacent turns of the platform and the bare loop."""
        orders = [Order(self.arguments.turn, bare=self.arguments.control), Order(self.arguments.turn, bare=True)]
        with self.contestants(partial(platform, beside=True), **run) as (ranks,):
            first = [ranks.turn(order) for order in orders]
            if not self.arguments.control and abs(first[0]["loss"] / first[1]["loss"] - 1) > 0.02:
                raise SystemExit(
                    f"{run}: the platform and the bare loop have different losses: {[r['loss'] for r in first]}"
                )
            for number in range(WARM_UP - 1 + self.arguments.pairs):
                turns = [0, 1] if number % 2 else [1, 0]
                seconds = {i: ranks.turn(orders[i])["seconds"] for i in turns}
                if number >= WARM_UP - 1:
                    yield seconds[0], seconds[1]

    def save(self) -> str:
        """Return the table of wall times, with saves / without saves, and of the time that the loop waits."""
        steps, every = self.arguments.save_steps, self.arguments.save_every
        rows = []
        for precision, runner in product(self.arguments.precisions[:1], self.arguments.save_runners):
            with self.contestants(platform, direct, runner=runner, amp=precision) as sides:
                ways = {
                    f"{name}, {'saves' if k else 'no save'}": (side, Order(steps, k))
                    for name, side in zip(("platform", "DeepSpeed"), sides, strict=True)
                    for k in (None, every)
                }
                for side in sides:
                    side.turn(Order(every, every))

                def run(way: str, ways: dict[str, tuple[Contestant, Order]] = ways) -> Result:
                    return ways[way][0].turn(ways[way][1])

                results = rounds(list(ways), run, self.arguments.rounds)
            ours, theirs = results["platform, saves"], results["DeepSpeed, saves"]
            row = [runner, precision]
            for name, saved in (("platform", ours), ("DeepSpeed", theirs)):
                row.append(ratio(saved, results[f"{name}, no save"], "seconds"))
            for name, saved in (("platform", ours), ("DeepSpeed", theirs)):
                bare = statistics.median(r["seconds"] for r in results[f"{name}, no save"]) / steps
                row.append(f"{statistics.median(r['stalled'] for r in saved) / (steps // every) / bare:.2f}")
            rows.append([*row, ratio(ours, theirs, "stalled")])
        head = f"{steps // every} saves in {steps} steps"
        columns = ["platform: wall time / no save", "DeepSpeed: wall time / no save"]
        columns += [
            "platform: stall per save, in steps",
            "DeepSpeed: stall per save, in steps",
            "stall, platform / DeepSpeed",
        ]
        return table([head, "precision", *columns], rows)

    def bandwidth(self) -> str:
        """Return the table of bytes per second, platform / plain files."""
        rows = []
        for runner in self.arguments.bandwidth_runners:
            with self.contestants(storage, runner=runner) as (side,):
                for way in ("save", "write"):
                    side.turn(way)

                def run(way: str, side: Contestant = side) -> Result:
                    action = way.removesuffix(" evicted")
                    if action in ("load", "read"):
                        side.turn(action if way == action else "evict")
                    result = side.turn(action)
                    return {"gb_per_second": result["bytes"] / result["seconds"] / 1e9}

                ways = ["save", "write", "load", "read", "load evicted", "read evicted"]
                results = rounds(ways, run, self.arguments.repetitions)
            medians = {way: statistics.median(r["gb_per_second"] for r in results[way]) for way in ways}
            pairs = {"save": "write", "load": "read", "load evicted": "read evicted"}
            rows.append([runner, *(f"{medians[ours] / medians[theirs]:.2f}" for ours, theirs in pairs.items())])
        columns = ["save / plain write", "load / plain read, from the page cache", "load / plain read, after eviction"]
        return table([f"bytes per second, {self.arguments.ranks} ranks", *columns], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    parts = ("step", "save", "bandwidth")
    add("--parts", nargs="+", choices=parts, default=parts)
    add("--device", default="cpu", choices=["cpu", "cuda"])
    add("--ranks", type=int, default=2)
    add("--threads", type=int, default=1, help="CPU threads per rank")
    add("--folder", help="folder for files (default: the system's temporary folder)")
    for name, default in vars(Sizes()).items():
        add(f"--{name}", type=int, default=default)
    add("--micro-batch", type=int, default=4)
    add("--precisions", nargs="+", default=["fp32"], help="precisions of the steps; the part save uses the first")
    add("--runners", nargs="+", default=["zero1", "zero2", "zero3", "fsdp"], help="runners of the part step")
    add("--accumulations", nargs="+", type=int, default=[1, 2])
    add("--pairs", type=int, default=30, help="pairs of turns per launch")
    add("--launches", type=int, default=2, help="number of times that the processes are started")
    add("--turn", type=int, default=1, help="steps per turn")
    add("--control", action="store_true", help="measure the noise: both sides are the bare loop")
    add("--save-runners", nargs="+", choices=["zero1", "zero2", "zero3"], default=["zero2", "zero3"])
    add("--save-steps", type=int, default=24)
    add("--save-every", type=int, default=6)
    add("--rounds", type=int, default=3, help="rounds of the part save")
    add("--bandwidth-runners", nargs="+", default=["zero3", "ddp"])
    add("--repetitions", type=int, default=7, help="rounds of the part bandwidth")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        benchmark = Benchmark(arguments, Path(folder))
        for part in arguments.parts:
            print(getattr(benchmark, part)(), end="\n\n", flush=True)


if __name__ == "__main__":
    main()
