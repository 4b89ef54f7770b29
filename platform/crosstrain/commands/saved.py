"""The configuration that a checkpoint was trained with, which may be anybody's."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from crosstrain.checkpoint.checkpointer import load_state
from crosstrain.config import Config
from crosstrain.errors import CheckpointError, ConfigError, sentence


def saved_config(checkpoint: Path, options: list[str]) -> Config:
    """The configuration in a checkpoint's state, with overrides.

    Raises CheckpointError where there is none, and ConfigError for what it may not say or the installation cannot do.
    """
    saved = load_state(checkpoint).get("config")
    if not isinstance(saved, dict):
        raise CheckpointError(f"{checkpoint}: its state has no configuration; name one with --cfg-path")
    try:
        return Config.from_plain(_without_harm(saved, checkpoint, options), options)
    except RecursionError:
        raise CheckpointError(f"{checkpoint}: its configuration is nested too deep") from None


def _without_harm(saved: dict[str, Any], checkpoint: Path, options: list[str]) -> dict[str, Any]:
    """A checkpoint's configuration without what would run code, write files or start processes: it may be anybody's."""
    run, datasets = saved.get("run"), saved.get("datasets")
    if isinstance(run, dict):
        if plugins := run.get("plugins"):
            named = ",".join(map(str, plugins)) if isinstance(plugins, list) else plugins
            note = (
                f"note: {checkpoint} names plugin folders, which are code and not imported on a checkpoint's word; if "
                f"you trust them: --options {shlex.quote(f'run.plugins=[{named}]')}"  # somebody may paste it
            )
            print(sentence(note), file=sys.stderr)
            run["plugins"] = []
        if any(option.startswith("run.runner=") for option in options):
            run.pop("runner", None)
        elif any(key.endswith("path") for key in _given(run.get("runner"))):
            raise ConfigError(
                f"{checkpoint}: its runner writes to a path of its own, which is not done on a checkpoint's word; name "
                f"the runner yourself: --options run.runner=..."
            )
        run.pop("trackers", None)  # which may not be installed here, and nothing is tracked
        if isinstance(run.get("num_workers"), int):
            run["num_workers"] = min(run["num_workers"], os.cpu_count() or 1)
    if isinstance(datasets, dict):
        for dataset in datasets.values():
            if isinstance(dataset, dict):
                dataset.pop("prepare", None)
            if any(text.startswith("pipe:") for text in _texts(dataset)):
                raise ConfigError(
                    f"{checkpoint}: its data come from a command (pipe:...), which is not run on a checkpoint's word; "
                    f"name a project file with --cfg-path"
                )
    return saved


def _texts(tree: Any) -> Iterator[str]:
    """Every text in a tree."""
    if isinstance(tree, str):
        yield tree
    elif isinstance(tree, (dict, list)):
        for item in tree.values() if isinstance(tree, dict) else tree:
            yield from _texts(item)


def _given(tree: Any) -> Iterator[str]:
    """Keys, at any depth, that have a value."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            if isinstance(value, dict):
                yield from _given(value)
            elif value is not None:
                yield str(key)
