"""`crosstrain plan` and `train --dry-run`: what a project will cost, and whether it fits, before anything starts."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import median
from typing import Any

from crosstrain.config.batch import BatchPlan
from crosstrain.config.load import Config, load_config, preset_files
from crosstrain.config.registry import registry
from crosstrain.distributed.launch.launcher import Launch
from crosstrain.monitor.report.read_run import read_runs
from crosstrain.planning.estimate import MODES, Estimate, Project, with_options
from crosstrain.planning.fit import _project
from crosstrain.planning.format import Budget, Plan, length
from crosstrain.planning.plot import draw
from crosstrain.planning.suggest import nearest
from crosstrain.utils.errors import UserError
from crosstrain.utils.units import read_bytes, read_number


def plan(arguments: argparse.Namespace) -> int:
    """Print the plan of `arguments.cfg_path`, and write it where it is wanted; returns the exit code."""
    config = load_config(arguments.cfg_path, arguments.options)
    budget = _budget(arguments)
    for name in ("output", "picture"):
        path = getattr(arguments, name)
        if path and not Path(path).absolute().parent.is_dir():
            raise UserError(f"--{name}: {Path(path).parent} is not a folder")
    size = arguments.world_size or Launch.detect(arguments.nproc_per_node, config.run.device).world_size
    others = {} if arguments.no_presets else _presets(arguments.cfg_path, arguments.options)
    made = _make(config, budget, size, others)
    print("\n".join(made.lines()))
    if arguments.output:
        Path(arguments.output).write_text(json.dumps(made.as_json(), indent=1) + "\n", encoding="utf-8")
    if arguments.picture:
        bars = [(made.chosen.runner, made.chosen.memory.device)]
        bars += [(name, e.memory.device) for name, e in made.presets.items() if isinstance(e, Estimate)]
        title = f"{Path(arguments.cfg_path).stem} on {size} ranks: memory of the fullest one's device"
        draw(Path(arguments.picture), title, bars, budget.device_memory)
    return 0


def _budget(arguments: argparse.Namespace) -> Budget:
    def number(name: str, flag: str) -> float | None:
        text = getattr(arguments, name)
        return read_number(text, flag) if text else None

    memory = read_bytes(arguments.device_memory, "--device-memory") if arguments.device_memory else None
    return Budget(
        memory, number("throughput", "--throughput"), _measured(arguments.tokens_per_second),
        number("tokens", "--tokens"),
    )  # fmt: skip


def _measured(given: str | None) -> float | None:
    """Tokens per second: a number, or what a run's folder says."""
    if not given or not Path(given).is_dir():
        return read_number(given, "--tokens-per-second") if given else None
    curve = read_runs([given])[0].curves.get("tokens_per_second")
    if curve is None:
        raise UserError(f"--tokens-per-second: {given} has logged no step yet")
    return median(curve.values)


def _presets(cfg_path: str, options: list[str]) -> dict[str, Config | str]:
    """The project under every runner in configs/, or why it cannot be configured so."""
    found: dict[str, Config | str] = {}
    for name in preset_files("runner"):
        try:
            found[name] = load_config(cfg_path, [*options, f"run.runner={name}"])
        except UserError as error:
            found[name] = str(error)
    return found


def _make(config: Config, budget: Budget, world_size: int, others: dict[str, Config | str]) -> Plan:
    project = _project(config)
    label = config.runner.name
    chosen = project.estimate(label, config, world_size)
    modes: dict[str, Estimate | str] = {}
    for mode in MODES:
        modes[mode] = _try(project, label, config, world_size, mode)
    presets: dict[str, Estimate | str] = {}
    configs: dict[str, Config] = {}
    for name, other in others.items():
        if isinstance(other, str):
            presets[name] = other
            continue
        configs[name] = _with_same_samples(other, chosen.batch, world_size)
        presets[name] = _try(project, name, configs[name], world_size, None)
    each = project.tokens_per_sample
    steps = length(budget.tokens, each and each * chosen.batch.global_batch, config.run.max_iters)
    made = Plan(project, budget, steps, chosen, modes, presets)
    made.formulas = project.model.memory_formulas(chosen.batch.micro_batch, each)
    if made.fits is False and budget.device_memory:
        made.advice = nearest(project, config, configs, world_size, budget.device_memory)
    return made


def _with_same_samples(config: Config, batch: BatchPlan, world_size: int) -> Config:
    """As many samples in a step as `batch` has, where this runner's data-parallel ranks divide them.

    The micro batch is the largest that goes, up to the one of `batch`.
    """
    runner = registry.get("runner", config.runner.name)
    try:
        each, rest = divmod(batch.global_batch, runner.data_parallel_size(config.runner.options, world_size))
    except UserError:
        return config  # which `_try` will say
    if rest or not each:
        return config
    micro = max(size for size in range(1, min(batch.micro_batch, each) + 1) if each % size == 0)
    return with_options(config, micro, global_batch=batch.global_batch)


def _try(project: Project, label: str, config: Config, world_size: int, mode: Any) -> Estimate | str:
    try:
        return project.estimate(label, config, world_size, mode)
    except UserError as error:
        return str(error)
