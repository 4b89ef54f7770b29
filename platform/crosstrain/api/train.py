"""Training from Python."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from crosstrain.api.keywords import with_defaults
from crosstrain.api.run import Run
from crosstrain.checkpoint.run_folder import RunFolder
from crosstrain.config.load import Config, ProjectLike, load_config
from crosstrain.config.registry import registry
from crosstrain.config.sources import Overrides
from crosstrain.distributed.launch.cluster_env import was_restarted
from crosstrain.distributed.launch.launch import Launch
from crosstrain.distributed.launch.launcher import launch
from crosstrain.engine.checks import batch_plan, check_continues, check_layout, possible_sizes
from crosstrain.training.preflight import preflight
from crosstrain.training.preflight_check import Start
from crosstrain.training.worker import train_worker
from crosstrain.utils.processes import main_hidden


def train(
    project: ProjectLike, options: Overrides = (), *, nproc_per_node: int = 1, fresh: bool = False, **given: Any
) -> Run:
    """Train a project in `nproc_per_node` processes. If its run folder holds an earlier run, resume that run.

    `fresh` starts over and keeps the earlier folder as NAME.1. given: options of the preflight checks, such as
    device_memory="24GiB" and fit_check=False. On Ctrl-C, or a notebook's stop button, the workers save a checkpoint,
    and KeyboardInterrupt is raised. Raises UserError for a user's mistakes and for known failures such as divergence, a
    full disk or a lost rank, and WorkerFailure, with the traceback, for an unexpected error in a worker.
    """
    flags = with_defaults(given, "preflight", "train", "checks")
    config = load_config(project, options)
    how = Launch.detect(nproc_per_node, config.run.device, max_restarts=config.run.max_restarts)
    run = Run(RunFolder(config.run.output_dir).path)
    with main_hidden():
        if start_training(project, options, config, replace(how, starts_workers=True), fresh, flags):
            raise KeyboardInterrupt
    return run


def check_start(
    project: ProjectLike,
    options: Overrides,
    config: Config,
    how: Launch,
    fresh: bool,
    given: Mapping[str, Any],
    dry_size: int | None = None,
) -> Config:
    """Run all checks that are possible before workers exist. Returns the configuration to train with.

    dry_size: number of ranks of a dry run, which starts no workers; None: workers will start.
    """
    dry, (size, *larger) = dry_size is not None, how.world_sizes
    nodes = size // how.nproc_per_node
    size = dry_size or size
    hint = None if how.joined else lambda n: f"--nproc-per-node {n // nodes} starts {n // nodes} workers"
    check_layout(config, size, hint, nodes)
    for other in larger:
        batch_plan(config, other)
    if config.run.on_lost_rank == "continue":
        check_continues(config, how)
    ready = preflight(config, size, dry=dry, fresh=fresh)
    start = Start(project, options, ready, size, how.is_first and not was_restarted(), dry)
    for check in registry.instances("preflight").values():
        check.run(start, given)
    return ready.config


def start_training(
    project: ProjectLike, options: Overrides, config: Config, how: Launch, fresh: bool, given: Mapping[str, Any]
) -> int:
    """Check everything, then start the workers. Returns the exit code.

    config: the result of `load_config(project, options)`.
    """
    config = check_start(project, options, config, how, fresh, given)
    if fresh and how.is_first and not was_restarted() and (aside := RunFolder(config.run.output_dir).set_aside()):
        print(f"starting over; the earlier run is kept in {aside}")
    sizes = possible_sizes(config, how.world_size) if config.run.on_lost_rank == "continue" else []
    try:
        return launch(train_worker, (config.plain, how.starts_workers), how, sizes, config.run.collective_timeout)
    except Exception as error:
        if how.is_first:
            RunFolder(config.run.output_dir).note_end(error, 5.0 if how.starts_workers else 0.0)
        raise
