"""`crosstrain train`: check everything, then start the workers."""

from __future__ import annotations

import argparse

from crosstrain.cli import plan
from crosstrain.cli.flags import add_config
from crosstrain.config.load import load_config
from crosstrain.distributed.launch.cluster_env import was_restarted
from crosstrain.distributed.launch.launcher import Launch, launch
from crosstrain.distributed.launch.rendezvous import Nodes
from crosstrain.distributed.launch.signals import sigint_kills
from crosstrain.utils.units import read_bytes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config(parser, required=True)
    parser.add_argument("--fresh", action="store_true", help="start over; the earlier run's folder is kept as NAME.1")
    parser.add_argument("--dry-run", action="store_true", help="print the costs, as `plan` does; start nothing")
    parser.add_argument("--no-fit-check", action="store_true", help="start although the device's memory is too small")
    group = parser.add_argument_group("several machines, the same command on each; the names are torchrun's")
    group.add_argument("--nnodes", metavar="N|MIN:MAX", help="machines that train together (default: 1)")
    group.add_argument("--node-rank", type=int, metavar="R", help="this machine's number, from 0")
    group.add_argument("--rdzv-endpoint", metavar="HOST:PORT", help="node 0's address, and a free port there")
    group.add_argument("--local-addr", metavar="ADDRESS", help="this machine's (default: the one that faces node 0)")
    group.add_argument("--rdzv-conf", metavar="KEY=N,...", help="rendezvous settings, such as join_timeout=600 (s)")
    plan.add_budget(parser)


def run(arguments: argparse.Namespace) -> int:
    """Train what the project file says; returns the exit code. Raises UserError for every mistake it can foresee."""
    if arguments.dry_run:
        return plan.run(arguments)
    a = arguments
    nodes = Nodes.of(a.nnodes, a.node_rank, a.rdzv_endpoint, a.local_addr, a.rdzv_conf)
    with sigint_kills():  # torch and plugins are imported
        from crosstrain.checkpoint.run_folder import RunFolder
        from crosstrain.engine.build import batch_plan
        from crosstrain.planning.estimate import Project
        from crosstrain.planning.fit import check_memory, gpu_memory
        from crosstrain.training.preflight import preflight
        from crosstrain.training.worker import train_worker

        config = load_config(a.cfg_path, a.options)
    how = Launch.detect(a.nproc_per_node, config.run.device, nodes, config.run.max_restarts)
    size, *larger = how.world_sizes
    for other in larger:
        batch_plan(config, other)
    ready = preflight(config, size)

    is_first_start = how.is_first and not was_restarted()
    limit = None
    if is_first_start and not a.no_fit_check:
        limit = read_bytes(a.device_memory, "--device-memory") if a.device_memory else gpu_memory(config)
    if limit is not None or ready.runner.cuts_models:
        project = Project(config, ready.model, ready.sample)
        if ready.runner.cuts_models:
            project.check_layouts(ready.plan, size)
        if limit is not None:
            check_memory(project, size, limit, lambda: plan.alternatives(a, project, size))

    if a.fresh and is_first_start and (aside := RunFolder(config.run.output_dir).set_aside()):
        print(f"starting over; the earlier run is kept in {aside}")
    return launch(train_worker, (config.plain, how.starts_workers), how)
