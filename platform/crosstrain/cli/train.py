"""`crosstrain train`: check everything, then start the workers."""

from __future__ import annotations

import signal
import textwrap

import torch

from crosstrain.checkpoint.frozen import Base
from crosstrain.checkpoint.run_folder import RunFolder
from crosstrain.cli.plan import first_batch, refuse_what_cannot_fit
from crosstrain.config.load import Config, load_config
from crosstrain.config.registry import registry
from crosstrain.distributed.launch import restarts
from crosstrain.distributed.launch.cluster_env import restarted
from crosstrain.distributed.launch.launcher import Launch, launch
from crosstrain.distributed.launch.rendezvous import Nodes
from crosstrain.distributed.launch.signals import StopRequest, ending_at_once
from crosstrain.engine.build import (
    batch_plan,
    check_fit,
    freeze,
    make_runner,
    model_on_meta,
    open_split,
    prepare_data,
)
from crosstrain.engine.optimizer import make_schedule, optimizer_factory
from crosstrain.monitor.progress import log
from crosstrain.monitor.trackers import check_trackers
from crosstrain.planning.estimate import Project
from crosstrain.train.trainer import Trainer, run_length
from crosstrain.utils.errors import explained


def train(
    cfg_path: str, options: list[str], nproc_per_node: int | None, fresh: bool, device_memory: str | None = "",
    nodes: Nodes | None = None,
) -> int:  # fmt: skip
    """Train what `cfg_path` says; returns the exit code. Raises UserError for every mistake it can foresee.

    `device_memory`: what must be enough, such as 24GiB; "": a GPU's own; None: whatever there is.
    """
    with ending_at_once():  # plugins are imported
        config = load_config(cfg_path, options)
    how = Launch.detect(nproc_per_node, config.run.device, nodes, config.run.max_restarts)
    for size in how.world_sizes[1:]:
        batch_plan(config, size)
    check(config, how.world_sizes[0])
    if device_memory is not None and how.is_first and not restarted():
        refuse_what_cannot_fit(config, how.world_sizes[0], device_memory)
    if fresh and how.is_first and not restarted():
        aside = RunFolder(config.run.output_dir).set_aside()
        if aside:
            print(f"starting over; the earlier run is kept in {aside}")
    return launch(train_worker, (config.plain, how.starts_workers), how)


def check(config: Config, world_size: int) -> None:
    """Everything that can go wrong before a worker exists: batch arithmetic, data, splits, model, layout, schedule."""
    plan = batch_plan(config, world_size)
    with explained(f"datasets.{', '.join(config.datasets)}: cannot be opened"):
        prepare_data(config)
        dataset = open_split(config, "train")
        if config.run.eval_interval:
            open_split(config, "val")
    with ending_at_once():
        model = model_on_meta(config)
    with explained("the model, its data and the run do not go together"):
        check_fit(model, dataset)
        Base.of(model).verify()
        freeze(model, config.run.freeze)
        runner = registry.get_runner_class(config.runner.name)
        runner.check_model(config.runner.options, model)
        if runner.cuts_models:
            Project(config, model, first_batch(dataset), "cpu").check_layouts(config, world_size)
        check_trackers(config.run.trackers)
        length = run_length(config, plan, dataset)
        make_schedule(config, length)
        optimizer_factory(config)([("weight", torch.nn.Parameter(torch.zeros(1, 1)))])  # whether it takes its options
    if config.run.profile is not None:
        config.run.profile.check(length, world_size)


def train_worker(plain: dict, under_launcher: bool) -> int:
    """What every worker runs; returns the signal that stopped it, or 0."""
    stop = StopRequest(under_launcher)
    config = Config.from_plain(plain)
    runner = make_runner(config)
    runner.setup()
    trainer = Trainer(config, runner, stop)
    restarts.tell(runner.world, trainer.state.step)
    trainer.fit()
    if not trainer.stopped:
        _farewell(trainer)
    runner.close()
    return int(stop.received or signal.SIGTERM) if trainer.stopped else 0  # which one, only some ranks may know


def _farewell(trainer: Trainer) -> None:
    """How good the model is, beside what no training gives; a sample of its text; what to open next."""
    run = trainer.run
    # A run too short for its first validation, such as a smoke run, does not end in one either.
    if trainer.val_dataset is not None and run.eval_interval is not None and run.eval_interval <= trainer.max_iters:
        metrics = trainer.last_validation or trainer.validate()
        log.info("validation perplexity %.2f (loss %.4f, %d tokens)", metrics.perplexity, metrics.loss, metrics.targets)
        if trainer.is_main:
            for name, perplexity in trainer.val_dataset.baselines().items():
                log.info("  against %.2f of the %s model, which learns nothing from context", perplexity, name)
    for sample in trainer.last_samples if trainer.last_validation else trainer.samples.draw():
        text = sample["prompt"] + sample["text"]
        log.info("sample of generated text:\n%s", textwrap.indent(text, "    | ", lambda _: True))
    folder = trainer.folder
    lines = [
        ("checkpoint", f"{folder.checkpoints} (`crosstrain export` makes a Hugging Face folder of one)"),
        *trainer.reporter.trackers.places(),
        ("try it", f"python evaluate.py --checkpoint {folder.path} --interactive"),
    ]
    log.info("open next:\n%s", "\n".join(f"  {what:<12} {where}" for what, where in lines))
