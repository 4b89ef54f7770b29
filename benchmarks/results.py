"""Train the projects that run on two CPU cores, and write their results to docs/results.md.

    python benchmarks/results.py                              # all rows; finished rows in the folder are kept
    python benchmarks/results.py --rows "quickstart, fsdp@2"  # run one row again, and write the page

Every row is one command with `run.bitwise=true` and one thread per rank, so that the hash of the weights can be
reproduced on the same kind of processor with the same releases of torch and transformers.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import itertools
import json
import platform
import shlex
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import ROOT, table

from crosstrain.api.run import Run

BARS = "▁▂▃▄▅▆▇█"
SCORES = ("val_loss", "val_reward", "val_accuracy")
POINTS = 12  # bars of a curve
PACKAGES = ("torch", "transformers", "timm", "deepspeed")
PAGE = ROOT / "docs" / "results.md"
CHAT = ("run.micro_batch_size=2",)


@dataclass(frozen=True)
class Row:
    """A project, and what its run changes."""

    project: str
    options: tuple[str, ...]
    ranks: int = 1
    after: str | None = None  # row whose result is the pretrained model; its folder replaces {after} in the options


QUICK = ("run.max_iters=80", "run.eval_interval=80", "run.micro_batch_size=4")
ROWS: dict[str, Row] = {
    "quickstart": Row("quickstart", QUICK),
    "quickstart, ddp@2": Row("quickstart", QUICK, 2),
    "quickstart, fsdp@2": Row("quickstart", (*QUICK, "run.runner=fsdp"), 2),
    "quickstart, zero2@2": Row("quickstart", (*QUICK, "run.runner=zero2"), 2),
    "quickstart, pipeline of 2": Row("quickstart", (*QUICK, "run.runner=megatron_pp2"), 2),
    "gpt2_chat_sft": Row("gpt2_chat_sft", (*CHAT, "run.max_epoch=null", "run.max_iters=60"), after="quickstart"),
    "gpt2_chat_lora": Row("gpt2_chat_lora", (*CHAT, "run.max_epoch=null", "run.max_iters=60"), after="quickstart"),
    "gpt2_chat_dpo": Row(
        "gpt2_chat_dpo",
        (*CHAT, "run.max_iters=30", "datasets.docstrings.tokenizer={after}"),
        after="gpt2_chat_sft",
    ),
    "qwen3_moe_tiny": Row("qwen3_moe_tiny", ("run.max_iters=40", "run.micro_batch_size=4", "run.eval_interval=40")),
    "image_text_shapes": Row(
        "image_text_shapes",
        ("run.warmup_steps=10", "run.max_iters=100", "run.micro_batch_size=12", "run.eval_interval=100"),
    ),
    "blip2_qwen_shapes": Row(
        "blip2_qwen_shapes",
        ("run.warmup_steps=10", "run.max_iters=60", "run.micro_batch_size=8", "run.eval_interval=60"),
    ),
    "arithmetic_guesses": Row("arithmetic_guesses", ("run.micro_batch_size=16",)),
    "grpo_arithmetic": Row(
        "grpo_arithmetic", ("run.max_iters=100", "run.micro_batch_size=16"), after="arithmetic_guesses"
    ),
    "gpt2_345m": Row(
        "gpt2_345m",
        (
            "run.max_iters=4", "run.global_batch_size=1", "run.micro_batch_size=1", "run.amp=bf16",
            "run.warmup_fraction=null", "run.warmup_steps=1", "run.log_interval=1",
        ),
    ),
}  # fmt: skip


def command(row: Row, output: str, pretrained: str) -> list[str]:
    """The command of a row, as a user types it in the project's folder."""
    options = [f"run.output_dir={output}", "run.bitwise=true", "run.threads=1", "run.device=cpu", *row.options]
    if row.after is not None:
        options = [option.replace("{after}", pretrained) for option in options] + [f"model.pretrained={pretrained}"]
    return [
        "train.py", "--cfg-path", f"projects/{row.project}.yaml", "--nproc-per-node", str(row.ranks), "--fresh",
        "--options", *options,
    ]  # fmt: skip


def run(name: str, folder: Path) -> None:
    """Train a row, and record its result in result.json."""
    row, output = ROWS[name], folder / slug(name)
    shutil.rmtree(output, ignore_errors=True)
    arguments = command(row, str(output), str(folder / slug(row.after)) if row.after else "")
    begun = time.monotonic()
    subprocess.run([sys.executable, *arguments], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    seconds = time.monotonic() - begun
    rows = Run(output).metrics
    (checkpoint,) = (output / "checkpoints").glob(f"step_{rows[-1]['step']:06d}")
    state = json.loads((checkpoint / "state.json").read_text())
    held_out = {key: line[key] for line in rows for key in SCORES if key in line}
    scores = [f"{key} {value:.4g}" for key, value in held_out.items()]
    result = {
        "steps": rows[-1]["step"],
        "seconds": seconds,
        "scores": scores,
        "weights": state["bitwise"]["weights"],
        "commit": subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, text=True).strip(),
        "packages": {package: importlib.metadata.version(package) for package in PACKAGES},
        "processor": processor(),
        "command": shlex.join(["python", *command(row, f"output/{slug(name)}", f"output/{slug(row.after or '')}")]),
    }
    (output / "result.json").write_text(json.dumps(result))


def slug(name: str) -> str:
    return name.replace(", ", "_").replace(" ", "_").replace("@", "_")


def processor() -> str:
    models = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return models[0].partition(": ")[2] if models else platform.processor()


def curve(losses: list[float]) -> str:
    """Draw losses as bars from the lowest to the highest; each bar is the mean of a part of the run."""
    parts = min(POINTS, len(losses))
    bounds = [len(losses) * i // parts for i in range(parts + 1)]
    means = [sum(losses[a:b]) / (b - a) for a, b in itertools.pairwise(bounds)]
    low, high = min(means), max(means)
    return "".join(BARS[round((mean - low) / ((high - low) or 1) * (len(BARS) - 1))] for mean in means)


def curve_of(output: Path) -> list[float]:
    """The logged rewards of a run that learns from rewards, whose loss says little; the logged losses of other runs."""
    rows = Run(output).metrics
    return [row["reward"] for row in rows if "reward" in row] or [row["loss"] for row in rows if "loss" in row]


def page(results: dict[str, tuple[dict[str, Any], list[float]]]) -> str:
    lines, places = [], {}
    for name, (found, values) in results.items():
        place = f"{found['processor']}; " + ", ".join(f"{key} {value}" for key, value in found["packages"].items())
        places.setdefault(place, len(places) + 1)
        minutes = f"{found['seconds'] / 60:.1f}"
        lines.append([
            name, found["steps"], minutes, curve(values), f"{values[0]:.3f}", f"{values[-1]:.3f}",
            ", ".join(found["scores"]) or "-", f"`{found['weights'][:12]}`", f"`{found['commit']}`", places[place],
        ])  # fmt: skip
    titles = [
        "run", "steps", "minutes", "curve", "first", "last", "held out", "SHA-256 of the weights", "commit", "machine"
    ]  # fmt: skip
    machines = "\n".join(f"{number}. {place}" for place, number in places.items())
    commands = "\n".join(found["command"] for found, _ in results.values())
    return f"""# Results

`python benchmarks/results.py` trains these projects on two CPU cores and writes this page from the runs' folders. The
runs are short: they show that a release learns as the last one did, not how good the models can become. The curve is
the loss of logged steps, or the reward of `grpo_arithmetic`, from the lowest to the highest bar. With the same commit,
the same kind of processor and the same packages, a run ends with the same hash. The quickstart has one hash under all
runners.

{table(titles, lines)}

Machines:

{machines}

`python benchmarks/results.py --rows NAME` runs a row again. These are the commands of the rows:

```sh
{commands}
```
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), help="rows to run again (default: unfinished rows)")
    parser.add_argument("--folder", type=Path, default=ROOT / "output" / "results")
    arguments = parser.parse_args()
    for name in arguments.rows or ROWS:
        if arguments.rows or not (arguments.folder / slug(name) / "result.json").exists():
            run(name, arguments.folder.absolute())
    results = {}
    for name in ROWS:
        output = arguments.folder / slug(name)
        if (output / "result.json").exists():
            results[name] = json.loads((output / "result.json").read_text()), curve_of(output)
    PAGE.write_text(page(results))


if __name__ == "__main__":
    main()
