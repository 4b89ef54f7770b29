"""Tiny GPT-2 models."""

from __future__ import annotations

from crosstrain.config.load import load_config
from crosstrain.engine.build import build_model
from crosstrain.engine.runner import Runner


def build(*options: str) -> Runner:
    """A single-process runner holding the tiny model that `options` ask for."""
    config = load_config(
        "projects/quickstart.yaml",
        ["model.n_layer=2", "model.n_embd=32", "model.n_head=2", "model.vocab_size=300", "run.amp=fp32", *options],
    )
    runner = Runner(None, config.run)
    runner.setup()
    build_model(config, runner, None, for_training=False)
    runner.model.eval()
    return runner
