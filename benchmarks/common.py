"""What the benchmarks share: interleaved rounds of child processes, and ratios with their spread."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "platform"))

Result = dict[str, float]


def child(script: str, *arguments: str, env: dict[str, str] | None = None) -> Result:
    """Run `script` with `arguments` in a process of its own; the last line that it prints is its result as JSON."""
    done = subprocess.run(
        [sys.executable, script, *arguments],
        capture_output=True,
        text=True,
        env=os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"} | (env or {}),
    )
    if done.returncode:
        raise SystemExit(f"{arguments} failed:\n{done.stdout}\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def rounds(contestants: Sequence[str], run: Callable[[str], Result], count: int) -> dict[str, list[Result]]:
    """`count` results of every contestant, taken in turn, so that a slow minute hits all alike."""
    results: dict[str, list[Result]] = {name: [] for name in contestants}
    for number in range(count):
        for name in contestants if number % 2 == 0 else reversed(contestants):
            results[name].append(run(name))
            print(f"round {number + 1} {name}: {results[name][-1]}", file=sys.stderr, flush=True)
    return results


def ratio(ours: list[Result], theirs: list[Result], key: str) -> str:
    """Median of the pairwise ratios ours / theirs, with the smallest and the largest."""
    pairs = [a[key] / b[key] for a, b in zip(ours, theirs, strict=True)]
    return f"{statistics.median(pairs):.2f} ({min(pairs):.2f} to {max(pairs):.2f})"


def table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)
