"""What is stored with a checkpoint, which may be anybody's: configuration, model, tokenizer."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from crosstrain import assembly
from crosstrain.checkpoint.base import Base, load_shards
from crosstrain.checkpoint.boxes import Shard
from crosstrain.checkpoint.checkpointer import load_state
from crosstrain.checkpoint.store import Reader
from crosstrain.config import Config, load_config
from crosstrain.construct import parameters_on_meta
from crosstrain.errors import CheckpointError, ConfigError, UserError, first_line, sentence
from crosstrain.registry import registry


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


def chosen_config(checkpoint: Path, arguments: argparse.Namespace) -> Config:
    """The run's own configuration; a project file replaces it, --options override either."""
    if arguments.cfg_path:
        return load_config(arguments.cfg_path, arguments.options)
    return saved_config(checkpoint, arguments.options)


def check_ranks(config: Config, world_size: int) -> None:
    """ConfigError, with the way out, where the runner cannot be laid out over so many ranks."""
    try:
        registry.get_runner_class(config.runner.name).data_parallel_size(config.runner.options, world_size)
    except ConfigError as error:
        raise ConfigError(f"{error}; give --nproc-per-node N, or another runner: --options run.runner=ddp") from None


def check_model(config: Config, checkpoint: Path) -> None:
    """CheckpointError unless the configured model has the checkpoint's parameters; found out before it takes memory.

    ConfigError unless the runner can lay it out.
    """
    # Tied parameters are registered more than once, and libraries may build modules that they then replace.
    reader = Reader.open(checkpoint)
    most = 100 + 4 * (len(reader.names("param")) + len(reader.frozen))
    try:
        with parameters_on_meta(most):
            model = assembly.make_model(config)
    except UserError:
        raise
    except Exception as error:  # whatever a library's constructor makes of absurd sizes
        reason = first_line(error)
        raise CheckpointError(f"{checkpoint}: the model of its configuration cannot be built ({reason})") from error
    shapes = {name: tuple(model.logical_shape(name, p.shape)) for name, p in model.canonical_parameters().items()}
    load_shards(reader, [Shard("param", name, shape, []) for name, shape in shapes.items()], Base.of(model))
    registry.get_runner_class(config.runner.name).check_model(config.runner.options, model)


def open_tokenizer(checkpoint: Path) -> Any:
    """The tokenizer that is stored with a checkpoint; UserError where there is none, or it cannot be loaded."""
    from transformers import AutoTokenizer

    if not (checkpoint / "tokenizer_config.json").is_file():
        raise ConfigError(
            f"{checkpoint}: no tokenizer is stored with it, so text is not possible; train with one "
            f"(datasets.<name>.tokenizer)"
        )
    try:
        return AutoTokenizer.from_pretrained(checkpoint, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # of many kinds, from Python and from Rust
        raise CheckpointError(f"{checkpoint}: its tokenizer cannot be loaded ({first_line(error)})") from error
