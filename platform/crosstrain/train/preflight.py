"""Checks before a worker exists."""

from __future__ import annotations

import torch

from crosstrain.checkpoint.frozen import Base
from crosstrain.config.load import Config
from crosstrain.config.registry import registry
from crosstrain.data.splits import first_batch, open_split, prepare_data
from crosstrain.distributed.launch.signals import sigint_kills
from crosstrain.engine.build import batch_plan, check_fit, freeze, model_on_meta
from crosstrain.engine.lr_schedule import make_schedule
from crosstrain.engine.optimizer import optimizer_factory
from crosstrain.monitor.trackers import check_trackers
from crosstrain.planning.estimate import Project
from crosstrain.train.trainer import run_length
from crosstrain.utils.errors import explained


def check(config: Config, world_size: int) -> None:
    """Everything that can go wrong before a worker exists: batch arithmetic, data, splits, model, layout, schedule."""
    plan = batch_plan(config, world_size)
    with explained(f"datasets.{', '.join(config.datasets)}: cannot be opened"):
        prepare_data(config)
        dataset = open_split(config, "train")
        if config.run.eval_interval:
            open_split(config, "val")
    with sigint_kills():
        model = model_on_meta(config)
    with explained("the model, its data and the run do not go together"):
        check_fit(model, dataset)
        Base.of(model).verify()
        freeze(model, config.run.freeze)
        runner = registry.get("runner", config.runner.name)
        runner.check_model(config.runner.options, model)
        if runner.cuts_models:
            Project(config, model, first_batch(dataset), "cpu").check_layouts(config, world_size)
        check_trackers(config.run.trackers)
        length = run_length(config, plan, dataset)
        make_schedule(config, length)
        optimizer_factory(config)([("weight", torch.nn.Parameter(torch.zeros(1, 1)))])  # whether it takes its options
    if config.run.profile is not None:
        config.run.profile.check(length, world_size)
