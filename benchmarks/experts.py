"""Validation loss of a mixture of experts and of a dense model with as many parameters active for a token.

    python benchmarks/experts.py

Trains projects/qwen3_moe_tiny.yaml, with and without its router loss, and the same model with MLPs in place of experts,
as wide as those that a token uses together; the same samples, steps and learning rate for all. Some minutes each.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
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
    arguments = parser.parse_args()
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


if __name__ == "__main__":
    main()
