"""`crosstrain plan` and `train --dry-run`: estimate what a project costs, and whether it fits, before it starts."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from crosstrain.cli.flags import add_config, new_file, positive
from crosstrain.config.load import Config, load_config, preset_files
from crosstrain.config.registry import registry
from crosstrain.distributed.launch.launcher import Launch
from crosstrain.monitor.report.read_run import read_runs
from crosstrain.utils.errors import ConfigError, UserError
from crosstrain.utils.units import read_bytes, read_number

if TYPE_CHECKING:
    from crosstrain.planning.estimate import Project
    from crosstrain.planning.fit import Alternatives


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config(parser, required=True)
    add_budget(parser)


def add_budget(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("planning")
    group.add_argument("--world-size", type=positive, metavar="N", help="ranks, there or not (default: as training)")
    group.add_argument("--device-memory", metavar="SIZE", help="of each rank's device, such as 24GiB: what fits?")
    group.add_argument("--throughput", metavar="FLOPS", help="a device's FLOP/s, such as 150T: how many days?")
    group.add_argument("--tokens-per-second", metavar="N", help="as measured, of all ranks: a number, or a run")
    group.add_argument("--tokens", metavar="N", help="of the whole training, such as 2.5B (default: run.max_iters)")
    group.add_argument("--no-presets", action="store_true", help="leave other runners out")
    group.add_argument("--output", type=new_file, metavar="FILE", help="write the plan as JSON")
    group.add_argument("--picture", type=new_file, metavar="FILE", help="draw memory as stacked bars, .svg or .png")


def run(arguments: argparse.Namespace) -> int:
    """Print the plan of a project, and write it where the flags say; returns the exit code."""
    from crosstrain.planning.estimate import Project
    from crosstrain.planning.plan import Budget, make_plan
    from crosstrain.training.preflight import dry_run

    a = arguments
    config = load_config(a.cfg_path, a.options)
    memory = read_bytes(a.device_memory, "--device-memory") if a.device_memory else None
    throughput = read_number(a.throughput, "--throughput") if a.throughput else None
    speed = _tokens_per_second(a.tokens_per_second) if a.tokens_per_second else None
    budget = Budget(memory, throughput, speed, read_number(a.tokens, "--tokens") if a.tokens else None)
    size = a.world_size or Launch.detect(a.nproc_per_node, config.run.device).world_size
    try:
        registry.get("runner", config.run.runner.name).data_parallel_size(config.run.runner.options, size)
    except ConfigError as error:
        raise ConfigError(f"{error}; --world-size N plans for N ranks") from error
    ready = dry_run(config, size)
    project = Project(config, ready.model, ready.sample, ready.absent)
    plan = make_plan(project, budget, size, alternatives(a, project, size))
    print("\n".join(plan.lines()))
    if a.output:
        a.output.write_text(json.dumps(plan.as_json(), indent=1) + "\n", encoding="utf-8")
    if a.picture:
        plan.draw(a.picture, f"{Path(a.cfg_path).stem} on {size} ranks: device memory of the fullest one")
    return 0


def _tokens_per_second(given: str) -> float:
    """Return the number, or the median over a run, given by its folder."""
    if not Path(given).is_dir():
        return read_number(given, "--tokens-per-second")
    curve = read_runs([given])[0].curves.get("tokens_per_second")
    if curve is None:
        raise UserError(f"--tokens-per-second: {given} has logged no step yet")
    return median(curve.values)


def alternatives(arguments: argparse.Namespace, project: Project, size: int) -> Alternatives:
    """Return the project under every runner in configs/, and a function that builds it with more settings."""
    from crosstrain.planning.estimate import Project
    from crosstrain.planning.fit import Alternatives
    from crosstrain.training.preflight import dry_run

    def rebuild(settings: list[str]) -> Project:
        config = load_config(arguments.cfg_path, [*arguments.options, *settings])
        ready = dry_run(config, size)
        return Project(config, ready.model, project.inputs, ready.absent)

    found: dict[str, Config | str] = {}
    for name in () if arguments.no_presets else preset_files("runner"):
        try:
            found[name] = load_config(arguments.cfg_path, [*arguments.options, f"run.runner={name}"])
        except UserError as error:
            found[name] = str(error)
    return Alternatives(found, rebuild)
