"""Measure how far log-probabilities while sampling are from those of the training forward.

    python benchmarks/parity.py [--tokens 100000]

A Qwen2 of 4 layers with random weights samples completions of prompts of 4 to 60 tokens, 1 to 8 at once, so that a row
has all kinds of neighbours. The training forward then computes the same tokens, in rows of their own and in batches of
other sizes. The figures are the largest and the mean absolute difference, and the largest ratio of probabilities.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from common import ROOT

sys.path.insert(0, str(ROOT / "tests"))

import numpy as np
import yaml
from crosstrain_plugins.builtin.objectives.episode import Episode, batch_of

from crosstrain.config.load import load_config
from crosstrain.engine.build import build_model, make_runner
from crosstrain.engine.runner import Runner
from crosstrain.inference.policy import Policy

MODEL = {
    "model_type": "qwen2", "vocab_size": 4096, "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.08,
}  # fmt: skip
NEW = 64  # tokens of a completion


def built(folder: Path, precision: str) -> Runner:
    project = {
        "model": {"arch": "causal_lm", "config": MODEL},
        "datasets": {"none": {"name": "text", "path": str(folder), "seq_length": 8}},
        "run": {
            "runner": "ddp",
            "output_dir": str(folder / "out"),
            "amp": precision,
            "max_iters": 1,
            "global_batch_size": 1,
        },
    }
    path = folder / f"{precision}.yaml"
    path.write_text(yaml.safe_dump(project))
    config = load_config(path)
    runner = make_runner(config)
    runner.setup()
    build_model(config, runner, None, for_training=False)
    return runner


def measure(runner: Runner, tokens: int) -> tuple[int, float, float]:
    """Return the number of tokens, and the largest and mean difference of their log-probabilities."""
    rng, dataset = np.random.default_rng(0), SimpleNamespace()
    policy: Any = Policy(runner, dataset)  # type: ignore[arg-type]
    episodes: list[Episode] = []
    for number in itertools.count():
        if sum(episode.length for episode in episodes) >= tokens:
            break
        prompts = [rng.integers(0, 4096, int(rng.integers(4, 61))) for _ in range(1 + number % 8)]
        keys = [(number, row) for row in range(len(prompts))]
        for key, prompt, found in zip(
            keys, prompts, policy.generate([{"input_ids": p} for p in prompts], keys, NEW), strict=True
        ):
            episodes.append(Episode(key, prompt.tolist(), "", found.tokens, [*found.log_probabilities]))
    largest = total = count = 0.0
    for start in range(0, len(episodes), 5):  # other neighbours than while sampling
        batch = batch_of(episodes[start : start + 5], None)
        known = batch["labels"] >= 0
        difference = (policy.log_probabilities(batch) - batch["sampled"]).abs()[known]
        largest, total = max(largest, difference.max().item()), total + difference.sum().item()
        count += len(difference)
    return int(count), largest, total / count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=100_000)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for precision in ("fp32", "bf16"):
            runner = built(Path(folder), precision)
            count, largest, mean = measure(runner, asked.tokens)
            ratio = np.exp(largest)
            print(f"{precision}: {count} tokens, largest {largest:.2e}, mean {mean:.2e}, largest ratio {ratio:.6f}")


if __name__ == "__main__":
    main()
