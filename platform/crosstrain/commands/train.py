"""`crosstrain train`: check everything, then start the workers."""

from __future__ import annotations

import signal
import textwrap

import torch

from crosstrain import assembly, restarts
from crosstrain.checkpoint.base import Base
from crosstrain.commands.plan import first_batch, refuse_what_cannot_fit
from crosstrain.config import Config, load_config
from crosstrain.errors import explained
from crosstrain.joined import restarted
from crosstrain.launch import Launch, launch
from crosstrain.monitor.console import log
from crosstrain.monitor.trackers import check_trackers
from crosstrain.nodes import Nodes
from crosstrain.optim import make_schedule, optimizer_factory
from crosstrain.planning.estimate import Project
from crosstrain.registry import registry
from crosstrain.run_folder import RunFolder
from crosstrain.signals import StopRequest, ending_at_once
from crosstrain.trainer import Trainer, run_length


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
        assembly.batch_plan(config, size)
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
    plan = assembly.batch_plan(config, world_size)
    with explained(f"datasets.{', '.join(config.datasets)}: cannot be opened"):
        assembly.prepare_data(config)
        dataset = assembly.open_split(config, "train")
        if config.run.eval_interval:
            assembly.open_split(config, "val")
    with ending_at_once():
        model = assembly.model_on_meta(config)
    with explained("the model, its data and the run do not go together"):
        assembly.check_fit(model, dataset)
        Base.of(model).verify()
        assembly.freeze(model, config.run.freeze)
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
    runner = assembly.make_runner(config)
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
