"""Compare the step time of bitwise runs with that of the same runner without `run.bitwise`.

    python benchmarks/bitwise_cost.py [--runners zero1 zero2 zero3 fsdp ddp pp2 tp2] [--pairs 20]
    python benchmarks/bitwise_cost.py --quick    # a tiny model, to test that it runs

Two contestants of two ranks with one thread each train the same GPT-2 through the platform, one with `run.bitwise`, and
alternate every few steps, in changing order. The table shows the median ratio of adjacent turns, with its 95 %
confidence interval. `ddp@1` is one rank. The width of tensor parallelism and the slices of context parallelism are 2;
their controls have none.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path

from common import Sizes, interval, table, write_project
from engines import Order, platform
from tensor_parallel import QUICK
from turns import Contestant, race

MEGATRON = {"pp2": {"pipeline_parallel": 2}, "tp2": {"tensor_parallel": 2}, "cp2": {"context_parallel": 2}}
RUNNERS = ["ddp@1", "ddp", "fsdp", "zero1", "zero2", "zero3", "pp2", "tp2", "cp2"]
PARTS = {"tp2": {"width": 2}, "cp2": {"slices": 2}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in vars(Sizes()).items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--runners", nargs="+", default=RUNNERS)
    parser.add_argument("--precisions", nargs="+", default=["fp32"])
    parser.add_argument("--accumulations", nargs="+", type=int, default=[1, 4], help="micro batches per rank and step")
    parser.add_argument("--micro-batch", type=int, default=4)
    parser.add_argument("--pairs", type=int, default=12, help="turns that are measured")
    parser.add_argument("--turn", type=int, default=2, help="steps of a turn")
    parser.add_argument("--quick", action="store_true", help="a tiny model and few turns, whose figures mean nothing")
    arguments = parser.parse_args()
    if arguments.quick:
        vars(arguments).update(QUICK)
    rows = []
    for runner in arguments.runners:
        for precision in arguments.precisions:
            for accumulation in arguments.accumulations:
                with tempfile.TemporaryDirectory() as folder:
                    rows.append(measure(arguments, Path(folder), runner, precision, accumulation))
                print(*rows[-1], flush=True)
    print(table(["runner", "precision", "accumulation", "step", "step time, bitwise / not"], rows))


def measure(arguments: argparse.Namespace, folder: Path, runner: str, precision: str, accumulation: int) -> list[str]:
    """Return a row of the table."""
    sizes = Sizes(*(getattr(arguments, name) for name in vars(Sizes())))
    run = {
        "output_dir": str(folder), "max_iters": 10**6, "micro_batch_size": arguments.micro_batch, "device": "cpu",
        "amp": precision, "accum_grad_iters": accumulation, "collective_timeout": 1e6, "threads": 1,
    }  # fmt: skip
    project = write_project(folder, sizes, run)
    name, _, ranks = runner.partition("@")
    chosen = {"name": "megatron", **MEGATRON[name]} if name in MEGATRON else {"name": name}
    bitwise = {"mode": "on"} | PARTS.get(name, {})

    def side(way: str) -> Contestant:
        options = [f"run.runner={json.dumps(chosen)}", f"run.output_dir={folder}/{way}", "model.dropout=0"]
        if way == "bitwise":
            options.append(f"run.bitwise={json.dumps(bitwise)}")
        env = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
        return Contestant(platform, str(project), options, ranks=int(ranks or 2), env=env)

    seconds = race(((way, side(way)) for way in ("bitwise", "engine")), Order(arguments.turn), arguments.pairs)
    ratios = [a / b for a, b in zip(seconds["bitwise"], seconds["engine"], strict=True)]
    step = f"{statistics.median(seconds['bitwise']) / arguments.turn:.3f} s"
    return [runner, precision, str(accumulation), step, interval(ratios)]


if __name__ == "__main__":
    main()
