"""Open the configuration and the model of an untrusted checkpoint or Hugging Face folder."""

import json
import math
import os
import shlex
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

from crosstrain.checkpoint.boxes import Shard
from crosstrain.checkpoint.checkpointer import load_state
from crosstrain.checkpoint.folders import find_checkpoint, is_hugging_face
from crosstrain.checkpoint.load_weights import PretrainedWeights, load_shards, open_weights
from crosstrain.config.load import Config, ProjectLike, load_config
from crosstrain.config.pretrained_folder import as_folder, convert_files
from crosstrain.config.registry import registry
from crosstrain.config.run_options import DEFAULT_MODEL, DEFAULT_RUNNER, RunOptions
from crosstrain.config.sources import Overrides, escape, pairs
from crosstrain.config.yaml_text import LARGEST_TREE
from crosstrain.distributed.launch.launch import Launch
from crosstrain.engine.build import build_model, make_model
from crosstrain.engine.runner import Runner, runner_class
from crosstrain.modeling.base import Model
from crosstrain.modeling.meta_init import parameters_on_meta
from crosstrain.utils.errors import CheckpointError, ConfigError, UserError, sentence
from crosstrain.utils.limited_process import LimitedProcess
from crosstrain.utils.trust import Trust, check_source, is_own, limited_to, names_command

# Limits for building a model: address space in bytes, not counting the model's largest parameter, and time in seconds.
_BYTES, _SECONDS = 1 << 30, 10.0
_PADDING = 1 << 26  # extra elements allowed for vocabulary padding, on top of twice the checkpoint's elements


def find_model(place: str | Path, weights: str | None) -> Path:
    """Find a checkpoint as `find_checkpoint` does, or a Hugging Face folder: `place`, or the conversion of this file.

    Also raises CheckpointError if the checkpoint has no weights called `weights`.
    """
    folder = as_folder(Path(place))
    found = folder if is_hugging_face(folder) else find_checkpoint(place)
    open_weights(found, weights)
    return found


def saved_config(checkpoint: Path, options: Overrides, trust_data: bool = False) -> Config:
    """Load the configuration stored in a checkpoint, with the user's overrides.

    The configuration is trusted to name data if this user trained with it or if `trust_data` is True. Raises
    CheckpointError if the checkpoint has no configuration, and ConfigError for values that are forbidden or that this
    installation does not support.
    """
    state = load_state(checkpoint)
    saved = state.get("config")
    if not isinstance(saved, dict):
        raise CheckpointError(f"{checkpoint}: its state has no configuration; pass a project file with --cfg-path")
    own = is_own(saved, state.get("signature"))
    trust = Trust.DATA if own or trust_data else Trust.NOTHING
    try:
        text = json.dumps(saved)
        if text.count(",") + len(text) // 100 > LARGEST_TREE:
            raise CheckpointError(f"{checkpoint}: its configuration has more than {LARGEST_TREE:,} values")
        saved = json.loads(text)
        return Config.from_plain(_for_evaluation(saved, checkpoint, own, options), options, trust=trust)
    except ConfigError:
        _note_plugins(saved, checkpoint)
        raise
    except RecursionError:
        raise CheckpointError(f"{checkpoint}: its configuration is nested too deeply") from None


# The first set of `run` options is taken from any checkpoint, the second set only from this user's own checkpoints.
# Other options get their defaults; unknown options are rejected.
_FROM_ANYBODY = {"device", "amp"}
_FROM_ITS_USER = _FROM_ANYBODY | {"runner", "micro_batch_size", "num_workers", "metrics", "objective"}
_NO_TRAINING = {"output_dir": "none", "max_iters": 1, "accum_grad_iters": 1}  # required options that evaluation ignores


def _for_evaluation(saved: dict[str, Any], checkpoint: Path, own: bool, options: Overrides) -> dict[str, Any]:
    """Reduce the `run` section of a checkpoint's configuration to the options that evaluation uses.

    `own`: True if the current user trained with this configuration.
    """
    run = saved.get("run")
    if isinstance(run, dict):
        if own and run.get("plugins") and not any(key == "run.plugins" for key, _ in pairs(options)):
            own_parts = run.get("metrics", []), run.get("objective")
            metrics = [m for m in own_parts[0] if m["name"] in registry.names("metric")]
            objective = next((o for o in own_parts[1:] if o and o["name"] in registry.names("objective")), None)
            if (metrics, objective) != own_parts:
                _note_plugins(saved, checkpoint)
            run = run | {"metrics": metrics, "objective": objective}
        left = {field.name for field in fields(RunOptions)} - (_FROM_ITS_USER if own else _FROM_ANYBODY)
        run = _NO_TRAINING | {key: value for key, value in run.items() if key not in left}
        if isinstance(run.get("num_workers"), int):
            run["num_workers"] = min(run["num_workers"], os.cpu_count() or 1)
        saved = saved | {"run": run}
    if names_command(saved):  # fail now, not when a shard is opened
        raise ConfigError(
            f"{checkpoint}: its data comes from a command (pipe:...), and commands from a checkpoint are not run; "
            f"pass a project file with --cfg-path"
        )
    return saved


def _note_plugins(saved: dict[str, Any], checkpoint: Path) -> None:
    """Print a note on the plugins in the configuration, if any, and on how to enable them."""
    run = saved.get("run")
    if isinstance(run, dict) and (plugins := run.get("plugins")):
        named = ",".join(map(str, plugins)) if isinstance(plugins, list) else plugins
        note = (  # the names are quoted, because the user may paste the end of the note into a shell
            f"note: {checkpoint} names plugins, which are code and are not imported; if you trust them, pass the "
            f"project file with --cfg-path, or pass --options {shlex.quote(f'run.plugins=[{named}]')}"
        )
        print(sentence(note), file=sys.stderr)


def open_config(checkpoint: Path, project: ProjectLike | None, options: Overrides, trust_data: bool) -> Config:
    """Load the configuration `project`, or else the checkpoint's own configuration, with the overrides `options`.

    If `checkpoint` is a Hugging Face folder, it replaces the project's `model.pretrained`; without a project, the
    configuration has no dataset.
    """
    if not is_hugging_face(checkpoint):
        if not project:
            return saved_config(checkpoint, options, trust_data)
        return load_config(project, options).continuing(load_state(checkpoint))
    given = dict(pairs(options)) | {"model.pretrained": escape(str(checkpoint))}
    if project:
        return load_config(project, given)
    plain = {"model": {"arch": DEFAULT_MODEL}, "datasets": {}, "run": _NO_TRAINING}
    return Config.from_plain(plain, given, trust=Trust.DATA)


def open_on_workers(
    checkpoint: Path,
    project: ProjectLike | None,
    options: Overrides,
    trust_data: bool,
    nproc_per_node: int | None,
    alone: bool = False,
) -> tuple[Config, Launch]:
    """Open a configuration, check its model, and choose the number of workers.

    alone: start only one worker.

    If the runner does not support the number of workers, and the user chose neither, plain torch in one process is
    used. Raises the errors of `open_config` and `outline`, and ConfigError for an impossible layout.
    """
    config = open_config(checkpoint, project, options, trust_data)
    how = Launch.detect(nproc_per_node or (1 if alone else None), config.run.device)
    if alone and how.world_size > 1:
        raise UserError("--interactive: expected one process; use --nproc-per-node 1")
    runner = runner_class(config.run)
    try:
        runner.data_parallel_size(config.run.runner.options, how.world_size)
    except ConfigError as error:
        if nproc_per_node or how.joined or any(key.startswith("run.runner") for key, _ in pairs(options)):
            hint = f"set --nproc-per-node N, or choose a different runner with --options run.runner={DEFAULT_RUNNER}"
            raise ConfigError(f"{error}; {hint}") from None
        config = Config.from_plain(config.plain, [f"run.runner={DEFAULT_RUNNER}"], trust=config.trust)
        how = Launch.detect(1, config.run.device)
        print(sentence(f"note: {error}; using one process with plain torch instead"), file=sys.stderr)
        runner = registry.get("runner", DEFAULT_RUNNER)
    runner.check_model(config.run.runner.options, config.run, outline(config, checkpoint))
    return config, how


def load_model(config: Config, runner: Runner, checkpoint: Path, weights: str | None) -> None:
    """Set up the runner with a checkpoint's model for evaluation; `weights` is passed to `Reader.open`."""
    held = None if is_hugging_face(checkpoint) else checkpoint  # a Hugging Face folder is loaded as model.pretrained
    build_model(config, runner, held, for_training=False, weights=weights)


def outline(config: Config, checkpoint: Path) -> Model:
    """Build the configured model on the meta device, and compare it with the checkpoint's tensors.

    Raises CheckpointError if building fails or exceeds its time or memory limit, and if the parameters do not match the
    checkpoint.
    """
    reader = open_weights(checkpoint)
    with limited_to(config.trust):
        convert_files(config.plain["model"])
        for name in reader.frozen:
            check_source(f"{checkpoint}: the source of the frozen parameter {name}")
    sizes = [math.prod(tensor.shape) for (kind, _), tensor in reader.tensors.items() if kind == "param"]
    sizes += [math.prod(frozen.shape) for frozen in reader.frozen.values()]
    # Tied parameters are registered more than once, and libraries may build modules and then replace them. Before a
    # parameter is registered, it takes address space but no memory.
    most, memory = 100 + 4 * len(sizes), _BYTES + 8 * max(sizes, default=0)

    def build() -> Model:
        with parameters_on_meta(most):
            return make_model(config)

    what = f"{checkpoint}: building the model in its configuration"
    LimitedProcess(lambda _: build() is None, what, memory=memory, seconds=_SECONDS, advice="check its sizes")(None)
    model = build()
    parameters = {**model.weights.parameters(), **model.weights.buffers()}
    shape_of = model.weights.logical_shape
    shards = [Shard("param", name, tuple(shape_of(name, p.shape)), []) for name, p in parameters.items()]
    pretrained = PretrainedWeights.of(model)
    if is_hugging_face(checkpoint):
        if checkpoint not in (source.folder for source, _ in pretrained.parts):
            raise CheckpointError(f"{checkpoint}: {config.model.name} cannot load weights from a Hugging Face folder")
        pretrained.summary(parameters)  # `summary` raises an error if parameters are missing
        pretrained.fill(shards)  # `fill` raises an error if shapes differ
    else:
        load_shards(reader, shards, pretrained)
    built = sum(p.numel() for p in model.parameters())
    if built > 2 * sum(sizes) + _PADDING:
        raise CheckpointError(
            f"{checkpoint}: the model in its configuration has {built} elements, including padding, but the "
            f"checkpoint has {sum(sizes)}"
        )
    return model
