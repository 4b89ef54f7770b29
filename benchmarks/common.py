"""Functions shared by the benchmarks: a project to train, interleaved rounds, and ratios with their spread."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "platform"))

Result = dict[str, float]


@dataclass(frozen=True)
class Sizes:
    """The sizes of a GPT-2 and of its training sequences."""

    layers: int = 6
    hidden: int = 384
    heads: int = 6
    length: int = 256
    vocabulary: int = 50257  # the model pads it to 50,304

    def samples(self) -> Any:
        """Return the random tokens of 64 sequences, [64, length + 1]; the last token is only a target."""
        import numpy as np

        return np.random.default_rng(0).integers(0, self.vocabulary, (64, self.length + 1))


def standard_library() -> Iterator[str]:
    """Yield the texts of the running Python's standard library."""
    from crosstrain.config.registry import registry

    reader = registry.get("reader", "stdlib")(None)
    for task in reader.tasks():
        yield from (document.text for document in reader.read(task))


def write_project(folder: Path, sizes: Sizes, run: dict[str, Any], **more: Any) -> Path:
    """Write random tokens and a project file that trains a GPT-2 on them; return the path of the project file.

    more: further options of the model.
    """
    from crosstrain_plugins.builtin.datasets.indexed_dataset import TokenWriter, best_dtype

    with TokenWriter(folder / "tokens", best_dtype(sizes.vocabulary)) as writer:
        writer.add([sizes.samples().reshape(-1).tolist()])
    model = {
        "arch": "gpt2", "n_layer": sizes.layers, "n_embd": sizes.hidden, "n_head": sizes.heads,
        "n_positions": sizes.length, "vocab_size": sizes.vocabulary,
        **more,
    }  # fmt: skip
    random = {"name": "text", "path": f"{folder}/tokens", "seq_length": sizes.length, "split": [1, 0, 0]}
    project = folder / "project.yaml"
    project.write_text(json.dumps({"model": model, "datasets": {"random": random}, "run": run}))  # JSON is YAML
    return project


def child(script: str, *arguments: str, env: dict[str, str] | None = None) -> Result:
    """Run `script` with `arguments` in a new process, and return its result: the last line that it prints, as JSON."""
    done = subprocess.run(
        [sys.executable, script, *arguments],
        capture_output=True,
        text=True,
        env=os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"} | (env or {}),
    )
    if done.returncode:
        raise SystemExit(f"{script} {' '.join(arguments)} failed:\n{done.stdout}\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def rounds(contestants: Sequence[str], run: Callable[[str], Result], count: int) -> dict[str, list[Result]]:
    """Return `count` results of every contestant. They take turns, so that a slow minute affects all equally."""
    results: dict[str, list[Result]] = {name: [] for name in contestants}
    for number in range(count):
        for name in contestants if number % 2 == 0 else reversed(contestants):
            results[name].append(run(name))
            print(f"round {number + 1} {name}: {results[name][-1]}", file=sys.stderr, flush=True)
    return results


def ratio(ours: list[Result], theirs: list[Result], key: str) -> str:
    """Return the median of the pairwise ratios ours / theirs, with the smallest and the largest ratio."""
    pairs = [a[key] / b[key] for a, b in zip(ours, theirs, strict=True)]
    return f"{statistics.median(pairs):.2f} ({min(pairs):.2f} to {max(pairs):.2f})"


def interval(pairs: Sequence[float], draws: int = 10_000) -> str:
    """Return the median of ratios with its bootstrap confidence interval of 95 %."""
    import numpy as np

    drawn = np.random.default_rng(0).choice(np.asarray(pairs), (draws, len(pairs)))
    low, high = np.percentile(np.median(drawn, axis=1), (2.5, 97.5))
    return f"{statistics.median(pairs):.3f} ({low:.3f} to {high:.3f})"


def table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Return a Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)
