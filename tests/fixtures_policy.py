"""A tiny model that has learned to answer sums with some digit, for tests of policy gradients."""

from __future__ import annotations

from pathlib import Path

import yaml

from crosstrain.config.registry import registry
from fixtures_ranks import train


def make_guesser(folder: Path) -> Path:
    """Train the model in `folder`, and write `grpo.yaml`, which goes on from it; return the folder."""
    model = {
        "arch": "causal_lm", "make_vocab_size_divisible_by": 1,
        "config": {
            "model_type": "qwen2", "vocab_size": 16, "bos_token_id": None, "eos_token_id": 13, "hidden_size": 32,
            "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
            "max_position_embeddings": 16,
        },
    }  # fmt: skip
    run = {
        "runner": "ddp", "output_dir": "first", "max_iters": 60, "global_batch_size": 32, "init_lr": 3e-3,
        "device": "cpu", "eval_interval": None, "threads": 1,
    }  # fmt: skip
    datasets = {"sums": {"name": "arithmetic", "path": str(folder / "data"), "guesses": True}}
    kind = registry.get("dataset", "arithmetic")
    for guesses in (True, False):
        kind.prepare(kind.Options(str(folder / "data"), guesses))
    (folder / "first.yaml").write_text(yaml.safe_dump({"model": model, "datasets": datasets, "run": run}))
    train(folder / "first.yaml", "first")
    run |= {
        "objective": {"name": "grpo", "rewards": [{"name": "answer"}], "completions": 4, "max_new_tokens": 2},
        "max_iters": 4, "global_batch_size": 8, "micro_batch_size": 4, "init_lr": 1e-3, "log_interval": 1,
    }  # fmt: skip
    again = {"arch": "causal_lm", "pretrained": str(folder / "first"), "make_vocab_size_divisible_by": 1}
    sums = {"sums": {"name": "arithmetic", "path": str(folder / "data")}}
    (folder / "grpo.yaml").write_text(yaml.safe_dump({"model": again, "datasets": sums, "run": run}))
    return folder
