"""Build and check the parts of a run that need no worker."""

import re
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from crosstrain.checkpoint.checkpointer import load_state
from crosstrain.checkpoint.folders import find_checkpoint, newest_valid, verified
from crosstrain.checkpoint.load_weights import PretrainedWeights
from crosstrain.checkpoint.run_folder import RunFolder
from crosstrain.config.batch import BatchPlan
from crosstrain.config.load import Config
from crosstrain.config.pretrained_folder import as_folder, convert_files, downloaded
from crosstrain.config.registry import registry
from crosstrain.data.dataset import Dataset
from crosstrain.data.splits import (
    first_batch,
    is_prepared,
    named_splits,
    open_split,
    prepare_data,
    training_dataset,
    vocabulary_size,
)
from crosstrain.distributed.launch.signals import sigint_kills
from crosstrain.engine.build import freeze, make_objective, make_schedule, model_on_meta
from crosstrain.engine.checks import batch_plan, check_fit, check_held, check_vocabulary
from crosstrain.engine.optimizer import optimizer_factory
from crosstrain.engine.runner import Runner, runner_class
from crosstrain.modeling.base import Model
from crosstrain.monitor.tracker import check_trackers
from crosstrain.utils.errors import CheckpointError, UserError, explained
from crosstrain.utils.foreign_weights import foreign_weights
from crosstrain.utils.paths import near
from crosstrain.utils.types import Batch


@dataclass
class Preflight:
    """Parts of a run that are built and checked without a worker."""

    config: Config
    plan: BatchPlan
    model: Model  # on the meta device, with parameters frozen as in the run
    dataset: Dataset | None = None  # the training split; None: not opened
    absent: list[str] = field(default_factory=list)  # names of pretrained weights that are not on this machine

    @property
    def runner(self) -> type[Runner]:
        return runner_class(self.config.run)

    @cached_property
    def sample(self) -> Batch | None:
        """A batch of one sample; None if it can be made neither from the dataset's options nor from its data."""
        component = training_dataset(self.config)
        if (shapes := registry.get("dataset", component.name).shapes(component.options)) is not None:
            return shapes
        try:
            return first_batch(self.dataset or open_split(self.config, "train"))
        except (UserError, OSError):
            return None


def as_begun(config: Config, fresh: bool) -> Config:
    """Return the configuration to continue with: dataset keys newer than the checkpoint get their legacy values.

    fresh: do not continue from the run's own folder. Raises CheckpointError if `run.resume_from` is needed and has no
    checkpoint.
    """
    run, newest = config.run, None
    if not fresh:
        newest, _ = newest_valid(RunFolder(run.output_dir).checkpoints, check=_read)
    if newest is None and run.resume_from:
        newest = find_checkpoint(run.resume_from, _read)
    return config if newest is None else config.continuing(load_state(newest))


def _read(checkpoint: Path) -> None:
    """Raise CheckpointError if the manifest or the state is malformed; checksums are verified when the run starts."""
    verified(checkpoint, whole=False)
    load_state(checkpoint)


def preflight(config: Config, world_size: int, dry: bool = False, fresh: bool = False) -> Preflight:
    """Build and check the batch plan, data, model, optimizer, schedule and trackers.

    dry: do not download, prepare or write anything; weights and prepared data may be absent. fresh: see `as_begun`. The
    result has the configuration that `as_begun` returns. Raises UserError for any mistake.
    """
    config = as_begun(config, fresh)
    run, runner = config.run, runner_class(config.run)
    plan = batch_plan(config, world_size)
    convert_files(config.plain)
    with sigint_kills():
        model, absent = _model_without_weights(config) if dry else (model_on_meta(config), [])
    dataset = None
    with explained(f"datasets.{', '.join(config.datasets)}: cannot be opened"):
        if not dry or is_prepared(config):
            prepare_data(config)
            dataset = open_split(config, "train")
            if run.eval_interval:
                open_split(config, "val")
            if "test" in named_splits(config):  # evaluated at the end of training
                open_split(config, "test")
    RunFolder(run.output_dir).check()
    with explained("the model, the data and the options of the run are incompatible"):
        objective = make_objective(config, model)
        if dataset is not None:
            check_fit(objective, dataset)
        else:
            check_vocabulary(model, vocabulary_size(config))
        check_held(model, runner, config)
        if not absent:
            weights = PretrainedWeights.of(model)
            weights.verify()
            weights.summary({*model.weights.parameters(), *model.weights.buffers(), *model.weights.quantized()})
        freeze(model, run.freeze)
        runner.check_model(config.run.runner.options, config.run, model)
        check_trackers(run.trackers)
        for callback in run.callbacks:
            registry.get("callback", callback.name).check(callback.options, run)
        # `max_iters` is None if the length of the run is given in epochs and the data was not opened.
        max_iters = run.max_iters if dataset is None else plan.steps(run, len(dataset))
        if max_iters is not None:
            make_schedule(config, max_iters)
        optimizer_factory(config)([("weight", torch.nn.Parameter(torch.zeros(1, 1)))])  # checks the options
    if run.profile is not None and max_iters is not None:
        run.profile.check(max_iters, world_size)
    return Preflight(config, plan, model, dataset, absent)


def dry_run(config: Config, world_size: int) -> Preflight:
    """Build the parts that a plan needs; nothing is downloaded or prepared, so weights and data may be absent."""
    convert_files(config.plain)
    model, absent = _model_without_weights(config)
    freeze(model, config.run.freeze)
    return Preflight(config, batch_plan(config, world_size), model, absent=absent)


def _model_without_weights(config: Config) -> tuple[Model, list[str]]:
    """Build the model on the meta device, and list its pretrained weights that are not on this machine."""
    absent: list[str] = []
    model = _without_weights(config.model, config.sized, absent)
    adapter = _without_weights(config.adapter, config.adapter, absent)
    return model_on_meta(replace(config, model=model, adapter=adapter)), absent


def _without_weights(value: Any, sized: Any, absent: list[str]) -> Any:
    """Remove missing pretrained weights from a component or its options, and list their names in `absent`.

    sized: `value` with all sizes from its presets, used if weights are missing, because weights determine the sizes.
    """
    if not is_dataclass(value) or isinstance(value, type):
        return value
    folder = getattr(value, "pretrained", None)
    if isinstance(folder, str) and not (path := Path(folder).expanduser()).exists():
        if foreign := foreign_weights(path):
            raise CheckpointError(f"{folder}: {foreign}")
        as_folder(path)  # raises DataError if a file to convert is missing
        if held := downloaded(folder):
            value = replace(value, pretrained=str(held))
        else:
            absent.append(folder)
            try:
                value = replace(sized, pretrained=None)
            except UserError:  # no option gives the sizes
                said = f"{folder}: not on this machine, so the model's sizes are unknown"
                fetch = f"download it with `hf download {folder}`, as a start without --dry-run does"
                hint = near(path) or (fetch if re.fullmatch(r"\w[\w.-]*(/[\w.-]+)?", folder) else "check the path")
                raise CheckpointError(f"{said}; {hint}") from None
    parts = [f.name for f in fields(value) if f.init]
    changed = {part: _without_weights(getattr(value, part), getattr(sized, part), absent) for part in parts}
    return replace(value, **changed)
