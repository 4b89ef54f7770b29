"""Compare the losses of a mixture of experts and a dense model, or the speed of expert parallelism and FSDP.

    python benchmarks/experts.py            # validation losses, some minutes for each run
    python benchmarks/experts.py --speed    # time of a step on two ranks

Losses: the models are projects/qwen3_moe_tiny.yaml, with and without its router loss, and the same model with MLPs
instead of experts. An MLP is as wide as all experts of a token together. All runs have the same samples, steps and
learning rate.

Speed: a larger mixture of experts trains on two ranks with one thread each, under `fsdp` and under expert parallelism.
Both contestants exist at the same time and alternate every step, in changing order. The table shows the median ratio
of adjacent turns, with its 95 % confidence interval, and the time of a step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from common import ROOT, interval, table
from engines import Order, platform
from plan_memory import MIXTURE, project_of
from turns import Contestant, race

PROJECT = ROOT / "projects" / "qwen3_moe_tiny.yaml"
DENSE = [
    "model.config.mlp_only_layers=[0, 1, 2, 3]", "model.config.intermediate_size=384", "model.router_loss_coef=null",
]  # fmt: skip
RUNS = {
    "dense": DENSE,
    "8 experts, 2 for a token": [],
    "the same, no router loss": ["model.router_loss=none"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("output/experts"), help="where the runs are written")
    parser.add_argument("--options", nargs="*", default=[], help="KEY=VALUE for all runs, such as run.max_iters=100")
    parser.add_argument("--speed", action="store_true", help="time steps of expert parallelism")
    parser.add_argument("--pairs", type=int, default=30, help="turns that are timed")
    arguments = parser.parse_args()
    if arguments.speed:
        return print(speed(arguments.options, arguments.pairs))
    print(f"{'model':<28}{'step':>6}{'val loss':>10}{'busiest expert / mean':>24}")
    for number, (name, options) in enumerate(RUNS.items()):
        folder = arguments.folder / str(number)
        given = [f"run.output_dir={folder}", "run.save_interval=null", *options, *arguments.options]
        command = [sys.executable, str(ROOT / "train.py"), "--cfg-path", str(PROJECT), "--options", *given]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        loads = {row["step"]: row["expert_load"] for row in rows if "expert_load" in row}
        for row in (row for row in rows if "val_loss" in row):
            load = f"{loads[row['step']]:.2f}" if loads else ""
            print(f"{name:<28}{row['step']:>6}{row['val_loss']:>10.4f}{load:>24}", flush=True)


def speed(options: list[str], turns: int) -> str:
    """Return the table of step times."""
    with tempfile.TemporaryDirectory() as folder:
        project = project_of(Path(folder), MIXTURE | {"runner": "fsdp"})

        def side(runner: str) -> Contestant:
            given = [f"run.runner={runner}", f"run.output_dir={folder}/{runner}", "run.max_iters=1000000", *options]
            given.append("run.collective_timeout=1e6")  # a rank is stopped while others run
            env = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
            return Contestant(platform, str(project), given, ranks=2, env=env)

        seconds = race(((name, side(name)) for name in ("fsdp", "megatron_ep2")), Order(1), turns)
    rows = [
        [
            name,
            f"{statistics.median(times):.3f} s",
            interval([a / b for a, b in zip(times, seconds["fsdp"], strict=True)]),
        ]
        for name, times in seconds.items()
    ]
    return table(["two ranks", "step", "this / fsdp"], rows)


if __name__ == "__main__":
    main()
