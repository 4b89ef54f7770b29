"""From nothing to a small chat model: tokenizer, pretraining, conversations, rewards and scores.

python projects/ladder/climb.py                                         # ddp on two workers
python projects/ladder/climb.py --runner fsdp --output output/ladder2   # the same hashes

Prints each command before it runs it. A second call with the same output goes on where the first one ended. Writes the
table of results to result.md in the output folder.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

HERE, DATA = Path("projects/ladder"), Path("data/ladder")
CHAPTERS = {"pretrain": "GPT-2 on Python's standard library", "chat": "conversations", "rewards": "GRPO on sums"}
# The keys of a project that name the results of earlier ones.
BEFORE: dict[str, dict[str, str]] = {
    "pretrain": {},
    "chat": {"model.pretrained": "pretrain"},
    "rewards": {"model.pretrained": "chat", "datasets.sums.tokenizer": "chat"},
}
QUESTIONS = ("What is 3 + 4 + 5?", "Which day comes after Friday?", "Repeat: q x b", "Close the brackets: ( [ {")


def say(script: str, *arguments: object) -> float:
    """Print a command and run it; return its seconds. Ends the program if the command fails."""
    words, begun = [script, *map(str, arguments)], time.monotonic()
    print(f"\n$ python {shlex.join(words)}", flush=True)
    if code := subprocess.call([sys.executable, *words]):
        sys.exit(code)
    return time.monotonic() - begun


@dataclass(frozen=True)
class Ladder:
    """The output folder, and how the commands run."""

    output: Path
    runner: str
    ranks: int
    options: list[str]  # of all trainings

    @property
    def workers(self) -> list[object]:
        """The flag with the number of workers."""
        return ["--nproc-per-node", self.ranks]

    def earlier(self, name: str) -> list[str]:
        """Return the options of a project that name earlier results."""
        return [f"{key}={self.output / result}" for key, result in BEFORE[name].items()]

    def train(self, name: str) -> float:
        """Train a project, and return the seconds."""
        given = [f"run.output_dir={self.output / name}", f"run.runner={self.runner}", *self.earlier(name)]
        file = HERE / f"{name}.yaml"
        return say("train.py", "--cfg-path", file, *self.workers, "--options", *given, *self.options)

    def evaluate(self, name: str, *flags: object) -> dict[str, Any]:
        """Evaluate a result on all workers, and return what evaluate.py writes."""
        scores = self.output / name / "scores.json"
        say("evaluate.py", "--checkpoint", self.output / name, *self.workers, "--output", scores, *flags)
        found: dict[str, Any] = json.loads(scores.read_text())
        return found

    def sums(self, name: str) -> str:
        """Return the share of right answers to held-out sums."""
        project = ["--cfg-path", HERE / "rewards.yaml", "--splits", "val", "--options", *self.earlier("rewards")]
        return f"{self.evaluate(name, *project)['splits']['val']['reward']:.1%}"

    def tasks(self, name: str) -> str:
        """Return the mean accuracy of the small tasks, or a dash without lm-evaluation-harness."""
        if find_spec("lm_eval") is None:
            return "-"
        found = self.evaluate(name, "--tasks", "small")["tasks"].values()
        accuracies = [task[key] for task in found for key in ("acc,none", "acc_norm,none") if key in task]
        return f"{sum(accuracies) / len(accuracies):.1%}"


def climb(ladder: Ladder) -> str:
    """Run all steps, and return the table of results."""
    if not DATA.exists():
        say(str(HERE / "write_data.py"), "--output", DATA)
    seconds = {name: ladder.train(name) for name in CHAPTERS}
    rows = [
        "| step | minutes | val loss | held-out sums | small tasks | SHA-256 of the weights |",
        "|---|--:|--:|--:|--:|---|",
    ]
    for name, title in CHAPTERS.items():
        trained = ladder.evaluate(name, "--splits", "val")
        val, weights = trained["splits"]["val"], trained["bitwise"]["weights"]
        loss, sums = f"{val['loss']:.4f}", "-"
        if name == "chat":
            sums = ladder.sums(name)
        elif name == "rewards":  # its val split has the sums
            loss, sums = "-", f"{val['reward']:.1%}"
        scores = f"{loss} | {sums} | {ladder.tasks(name)}"
        rows.append(f"| {title} | {seconds[name] / 60:.1f} | {scores} | `{weights[:16]}` |")
    say(
        "evaluate.py", "--checkpoint", ladder.output / "rewards", "--chat", "--temperature", 0, "--generate", *QUESTIONS
    )
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runner", default="ddp", help="runner of all steps (default: ddp)")
    parser.add_argument("--nproc-per-node", type=int, default=2, metavar="N", help="workers (default: 2)")
    parser.add_argument("--output", type=Path, default=Path("output/ladder"), help="default: output/ladder")
    parser.add_argument("--options", nargs="+", default=[], metavar="KEY=VALUE", help="options of all trainings")
    given = parser.parse_args()
    begun = time.monotonic()
    result = climb(Ladder(given.output, given.runner, given.nproc_per_node, given.options))
    (given.output / "result.md").write_text(result)
    print(f"\n{result}\n{(time.monotonic() - begun) / 60:.0f} minutes; talk to the model with:")
    print(f"$ crosstrain serve --checkpoint {given.output / 'rewards'}")
