"""Training from Python."""

import sys
from dataclasses import replace

from crosstrain.api.plan import alternatives
from crosstrain.api.run import Run, live
from crosstrain.checkpoint.run_folder import RunFolder
from crosstrain.config.load import Config, ProjectLike, load_config
from crosstrain.config.sources import Overrides
from crosstrain.distributed.launch.cluster_env import was_restarted
from crosstrain.distributed.launch.launcher import Launch, launch
from crosstrain.engine.build import batch_plan, check_layout
from crosstrain.planning.estimate import Project
from crosstrain.planning.fit import check_memory, gpu_memory, lack_of_space
from crosstrain.training.preflight import preflight
from crosstrain.training.worker import train_worker
from crosstrain.utils.processes import main_hidden
from crosstrain.utils.units import read_bytes


def train(
    project: ProjectLike, options: Overrides = (), *, nproc_per_node: int = 1, fresh: bool = False,
    fit_check: bool = True, device_memory: str | None = None,
) -> Run:  # fmt: skip
    """Train what a project says in `nproc_per_node` processes, resuming where its folder left off.

    `fresh` starts over and keeps the earlier folder as NAME.1; `device_memory`, such as "24GiB", and `fit_check` are
    those of the command line. Ctrl-C, or a notebook's stop, has the workers save; then KeyboardInterrupt is raised.
    Raises UserError for mistakes and for what ends a training, WorkerFailure with its traceback for any other error.
    """
    config = load_config(project, options)
    how = Launch.detect(nproc_per_node, config.run.device, max_restarts=config.run.max_restarts)
    run = Run(RunFolder(config.run.output_dir).path)
    with live(run), main_hidden():
        how = replace(how, starts_workers=True)
        stopped = start_training(project, options, config, how, fresh, fit_check, device_memory)
    if stopped:
        raise KeyboardInterrupt
    return run


def start_training(
    project: ProjectLike, options: Overrides, config: Config, how: Launch, fresh: bool, fit_check: bool,
    device_memory: str | None,
) -> int:  # fmt: skip
    """Check everything, then start the workers; returns the exit code. `config` is what `project` says."""
    size, *larger = how.world_sizes
    nodes = size // how.nproc_per_node
    hint = None if how.joined else lambda n: f"--nproc-per-node {n // nodes} starts {n // nodes} workers"
    check_layout(config, size, hint, nodes)
    for other in larger:
        batch_plan(config, other)
    ready = preflight(config, size, fresh=fresh)
    config = ready.config

    is_first_start = how.is_first and not was_restarted()
    limit = None
    if is_first_start and fit_check:
        limit = read_bytes(device_memory, "--device-memory") if device_memory else gpu_memory(config)
    if limit is not None or ready.runner.capabilities.cuts_models:
        planned = Project(config, ready.model, ready.sample)
        if ready.runner.capabilities.cuts_models:
            planned.check_layouts(ready.plan, size)
        if limit is not None:
            check_memory(planned, size, limit, lambda: alternatives(project, options, planned, size))

    assert ready.max_iters is not None, "the data has been opened"
    if is_first_start and (lack := lack_of_space(Project(config, ready.model, None), ready.max_iters, fresh)):
        print(f"note: {lack}", file=sys.stderr)
    if fresh and is_first_start and (aside := RunFolder(config.run.output_dir).set_aside()):
        print(f"starting over; the earlier run is kept in {aside}")
    try:
        return launch(train_worker, (config.plain, how.starts_workers), how)
    except Exception as error:
        if how.is_first:
            RunFolder(config.run.output_dir).note_end(error, 5.0 if how.starts_workers else 0.0)
        raise
