"""Compare the validation losses of a project under several optimizers: `python benchmarks/optimizers.py FOLDER`.

Every optimizer runs with several learning rates, and its best rate counts. All runs have the same samples, steps and
initial weights. Runs that exist in FOLDER are not repeated.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from common import ROOT


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="folder of the runs")
    parser.add_argument("--cfg-path", default="projects/quickstart.yaml", metavar="FILE")
    parser.add_argument("--optimizers", nargs="+", default=["adamw", "muon"], metavar="NAME")
    parser.add_argument("--rates", nargs="+", default=["1.5e-3", "3e-3", "6e-3"], metavar="RATE")
    parser.add_argument(
        "--figure", type=Path, metavar="FILE", help="SVG file with the validation losses of the best runs"
    )
    parser.add_argument("--options", nargs="*", default=[], metavar="KEY=VALUE", help="options of every run")
    args = parser.parse_args()
    best: dict[str, list[dict[str, Any]]] = {}
    print("| optimizer | rate | validation loss | optimizer's share of the step |\n|---|--:|--:|--:|")
    for name in args.optimizers:
        for rate in args.rates:
            rows = train(args.folder / f"{name}_{rate}", args.cfg_path, name, rate, args.options)
            losses = [row for row in rows if "val_loss" in row]
            shares = [row["timers"]["optimizer"] / row["timers"]["step"] for row in rows[1:] if "timers" in row]
            print(f"| `{name}` | {rate} | {losses[-1]['val_loss']:.4f} | {statistics.median(shares):.1%} |", flush=True)
            best[name] = min(best.get(name, losses), losses, key=lambda found: found[-1]["val_loss"])
    if args.figure is not None:
        draw(best, args.figure)


def train(folder: Path, project: str, optimizer: str, rate: str, options: list[str]) -> list[dict[str, Any]]:
    """Return the rows of a run's metrics.jsonl; train first if it does not exist. min_lr is a tenth of `rate`."""
    if not (folder / "metrics.jsonl").exists():
        chosen = [f"run.optimizer={optimizer}", f"run.init_lr={rate}", f"run.min_lr={float(rate) / 10}"]
        command = [sys.executable, str(ROOT / "train.py"), "--cfg-path", project, "--options", *chosen, *options]
        env = os.environ | {"HF_HUB_OFFLINE": "1"}
        done = subprocess.run([*command, f"run.output_dir={folder}"], cwd=ROOT, capture_output=True, text=True, env=env)
        if done.returncode:
            raise SystemExit(f"{folder}: training failed:\n{done.stdout}\n{done.stderr}")
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def draw(best: dict[str, list[dict[str, Any]]], file: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 3.5), layout="constrained")
    for name, losses in best.items():
        axes.plot([row["step"] for row in losses], [row["val_loss"] for row in losses], marker="o", label=name)
    axes.set(xlabel="step", ylabel="validation loss")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(file, metadata={"Date": None})


if __name__ == "__main__":
    main()
