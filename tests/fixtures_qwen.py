"""Tiny Qwen models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from conftest import Workspace
from crosstrain.config.load import load_config
from crosstrain.engine.build import build_model
from crosstrain.engine.runner import Runner


def use(workspace: Workspace, **model: Any) -> Workspace:
    """The workspace with this Qwen for its project's model."""
    workspace.config["model"] = {"arch": "qwen", **model}
    workspace.project.write_text(yaml.safe_dump(workspace.config))
    return workspace


def build(workspace: Workspace, checkpoint: Path | None = None) -> Runner:
    """A single-process runner that holds the project's model."""
    config = load_config(workspace.project, [])
    runner = Runner(None, config.run)
    runner.setup()
    build_model(config, runner, checkpoint, for_training=False)
    runner.model.eval()
    return runner
