"""Compare diloco with ddp over slow links: loss, bytes and step times of quickstart's model and data.

    python benchmarks/diloco.py [--steps 400] [--batch 32] [--first 100] [--momentum 0.5] [--part loss|sent|overlap]

Each group is one rank. `loss`: validation losses after equal numbers of samples; the first steps (`--first`) are those
of ddp, and the run then changes its runner. `sent` and `overlap` put each rank into a network namespace of its own,
with links of 20 Mbit/s and a latency of 50 ms, which needs root. `overlap` measures step times in turns: without an
exchange, with an exchange of the whole model, and with fragments that are exchanged while the next steps run.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import ROOT, Result, ratio, rounds, table
from slow_links import SlowLinks

LATENCY, RATE = 0.05, 20e6
PORT = 29500
WINDOW = (60, 110)  # steps between which bytes are counted, with one exchange
# run.grad_norm_clip and the rest are quickstart's
OPTIONS = (
    "datasets.stdlib.seq_length=128",
    "run.global_batch_size=8",
    "run.save_interval=null",
    "run.sample_prompts=[]",
    "run.threads=1",
    "run.log_interval=1",
    "run.amp=fp32",
)


def runner(**options: Any) -> str:
    return f"run.runner={json.dumps({'name': 'diloco'} | options)}"


def run(
    folder: Path, nodes: int, runner: str, steps: int, links: SlowLinks | None, *more: str, fresh: bool = True
) -> Result:
    """Train, and return the validation loss, the median step time of the last half, and the bytes sent per node.

    fresh: start over; False: resume the run in `folder`.
    """
    options = [*OPTIONS, f"run.output_dir={folder}", f"run.max_iters={steps}", runner, *more]
    before = links.sent() if links else []
    processes = []
    for node in range(nodes):
        command = [sys.executable, "train.py", "--cfg-path", "projects/quickstart.yaml", *["--fresh"] * fresh]
        if links is None:
            command += ["--nproc-per-node", str(nodes)]
        else:
            command += ["--nnodes", str(nodes), "--node-rank", str(node), "--nproc-per-node", "1"]
            command += ["--rdzv-endpoint", f"{links.addresses[0]}:{PORT}"]
            command = ["ip", "netns", "exec", links.names[node], *command]
        command += ["--options", *options]
        output = folder.with_suffix(f".{node}.log").open("w")
        processes.append(
            subprocess.Popen(command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=output, stderr=output)
        )
        if links is None:
            break
    counts = {step: _sent_at(folder, step, links, processes) for step in WINDOW if links and step <= steps}
    if any([process.wait() for process in processes]):
        raise SystemExit(folder.with_suffix(".0.log").read_text()[-3000:])
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    times = [row["step_ms"] for row in rows if "step_ms" in row]
    found = {"step_ms": statistics.mean(times[len(times) // 2 :])}
    if losses := [row["val_loss"] for row in rows if "val_loss" in row]:
        found["loss"] = losses[-1]
    if links is not None:
        ends = [counts[step] for step in WINDOW] if WINDOW[-1] in counts else [before, links.sent()]
        taken = WINDOW[1] - WINDOW[0] if WINDOW[-1] in counts else steps
        found["bytes"] = max(after - start for start, after in zip(*ends, strict=True)) / taken
    return found


def _sent_at(folder: Path, step: int, links: SlowLinks, processes: list[subprocess.Popen[bytes]]) -> list[int]:
    """Bytes that each node has sent when a step is complete."""
    rows = folder / "metrics.jsonl"
    while not rows.exists() or len(rows.read_text().splitlines()) < step:
        if any(process.poll() for process in processes):
            break
        time.sleep(0.02)
    return links.sent()


def losses(folder: Path, steps: int, batch: int, first: int, momentum: float) -> None:
    validated = (f"run.global_batch_size={batch}", f"run.lr_decay_iters={steps}", f"run.eval_interval={steps}")
    rows = []
    ddp = run(folder / "ddp", 2, "run.runner=ddp", steps, None, *validated)
    run(folder / "first", 2, "run.runner=ddp", first, None, *validated)
    for groups in (2, 4):
        for exchange in ("bf16", "int8"):
            chosen = runner(groups=groups, every=50, exchange=exchange, outer_lr=1.0, outer_momentum=momentum)
            name = shutil.copytree(folder / "first", folder / f"{exchange}{groups}")
            found = run(name, groups, chosen, steps, None, *validated, fresh=False)
            rows.append([f"{groups} groups, {exchange}", f"{found['loss']:.4f}", f"{found['loss'] / ddp['loss']:.3f}"])
            print(rows[-1], file=sys.stderr, flush=True)
    print(table(["", "loss", "of ddp's"], [["ddp", f"{ddp['loss']:.4f}", "1"], *rows]))


def sent(folder: Path) -> None:
    rows = []
    for groups in (2, 4):
        with SlowLinks(groups, LATENCY, RATE) as links:
            off = "run.eval_interval=null"
            ddp = run(folder / f"ddp{groups}", groups, "run.runner=ddp", 6, links, off)["bytes"]
            for exchange in ("bf16", "int8"):
                chosen = runner(groups=groups, every=50, exchange=exchange)
                found = run(folder / f"{exchange}{groups}", groups, chosen, 120, links, off)["bytes"]
                rows.append([f"{groups} groups, {exchange}", f"{ddp:,.0f}", f"{found:,.0f}", f"1/{ddp / found:.0f}"])
                print(rows[-1], file=sys.stderr, flush=True)
    print(table(["bytes that a rank sends per step", "ddp", "diloco", "ratio"], rows))


def overlaps(folder: Path, count: int) -> None:
    settings = {
        "none": runner(every=1000),
        "whole": runner(every=50),
        "fragments": runner(every=50, fragments=4, overlap=10),
    }
    with SlowLinks(2, LATENCY, RATE) as links:
        found = rounds(
            [*settings],
            lambda name: run(folder / name, 2, settings[name], 110, links, "run.eval_interval=null"),
            count,
        )
    rows = [[name, ratio(found[name], found["none"], "step_ms")] for name in ("whole", "fragments")]
    print(table(["exchange", "step time, of no exchange"], rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch", type=int, default=32, help="samples per step of the part `loss`")
    parser.add_argument(
        "--first", type=int, default=100, help="steps of ddp before the groups train apart, in the part `loss`"
    )
    parser.add_argument("--momentum", type=float, default=0.5, help="of the outer SGD, in the part `loss`")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--part", choices=("loss", "sent", "overlap"))
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if asked.part in ("loss", None):
            losses(Path(folder), asked.steps, asked.batch, asked.first, asked.momentum)
        if asked.part in ("sent", None):
            sent(Path(folder))
        if asked.part in ("overlap", None):
            overlaps(Path(folder), asked.rounds)


if __name__ == "__main__":
    main()
