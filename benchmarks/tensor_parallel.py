"""Compare tensor parallelism with a single process, and with torch's own parallel styles.

    python benchmarks/tensor_parallel.py [--pairs 20]
    python benchmarks/tensor_parallel.py --quick    # a tiny model, to test that it runs

Three contestants train the same GPT-2 through the platform, each on two cores: one process with two threads; two ranks
of `megatron_tp2` with one thread each; and two ranks with the same plan under torch's DTensor
styles (plugins/dtensor_styles.py). All exist at the same time and alternate every few steps, in changing order. The
table shows the median ratio of adjacent turns, with its 95 % confidence interval, and the time of a step.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path

from common import ROOT, Sizes, interval, table, write_project
from engines import Order, platform
from turns import Contestant, race

QUICK = {"layers": 2, "hidden": 64, "heads": 2, "length": 32, "vocabulary": 512, "micro_batch": 2, "pairs": 2}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in vars(Sizes()).items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--micro-batch", type=int, default=8)
    parser.add_argument("--pairs", type=int, default=20, help="turns that are measured")
    parser.add_argument("--turn", type=int, default=2, help="steps of a turn")
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--quick", action="store_true", help="a tiny model and few turns, whose figures mean nothing")
    arguments = parser.parse_args()
    if arguments.quick:
        vars(arguments).update(QUICK)
    with tempfile.TemporaryDirectory() as folder:
        print(measure(arguments, Path(folder)))


def measure(arguments: argparse.Namespace, folder: Path) -> str:
    """Return the table."""
    sizes = Sizes(*(getattr(arguments, name) for name in vars(Sizes())))
    run = {
        "output_dir": str(folder), "max_iters": 10**6, "micro_batch_size": arguments.micro_batch, "device": "cpu",
        "amp": arguments.precision, "plugins": [str(ROOT / "benchmarks" / "plugins")], "collective_timeout": 1e6,
    }  # fmt: skip
    project = write_project(folder, sizes, run)
    field = {
        "one process, two threads": ("ddp", 1),
        "megatron_tp2": ("megatron_tp2", 2),
        "DTensor styles": ("dtensor_styles", 2),
    }

    def side(name: str) -> Contestant:
        runner, ranks = field[name]
        options = [f"run.runner={runner}", f"run.output_dir={folder}/{runner}", "model.dropout=0"]
        env = {"OMP_NUM_THREADS": str(2 // ranks), "DS_ACCELERATOR": "cpu"}
        return Contestant(platform, str(project), options, ranks=ranks, env=env)

    seconds = race(((name, side(name)) for name in field), Order(arguments.turn), arguments.pairs)
    ours = seconds["megatron_tp2"]
    rows = [
        [
            name,
            f"{statistics.median(times) / arguments.turn:.3f} s",
            interval([a / b for a, b in zip(ours, times, strict=True)]),
        ]
        for name, times in seconds.items()
    ]
    return table(["two cores", "step", "megatron_tp2 / this"], rows)


if __name__ == "__main__":
    main()
