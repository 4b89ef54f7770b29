"""A plan: a project's costs under its own runner, other runners and each checkpointing mode, as text and JSON."""

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from textwrap import wrap
from typing import Any

from crosstrain import Config, ProjectLike, UserError, load_config
from crosstrain.config.load import preset_files
from crosstrain.config.sources import Overrides, pairs
from crosstrain.distributed.launch.launch import Launch
from crosstrain.engine.checks import check_layout
from crosstrain.engine.runner import runner_class
from crosstrain.training.preflight import dry_run
from crosstrain.utils.paths import near

from ..units import read_bytes, read_number, show_bytes, show_number
from .estimate import HOST_COPY, MODES, Estimate, Project, with_options, with_same_samples
from .fit import USABLE, Advice, Alternatives, nearest, needs

_DAY = 86400.0


@dataclass
class Budget:
    """Device memory, speed and length of the run, as given by the user; None: not given."""

    device_memory: int | None = None  # bytes
    throughput: float | None = None  # FLOP/s of one device, including recomputation
    tokens_per_second: float | None = None  # speed of all ranks together
    tokens: float | None = None  # training tokens of the run; None: run.max_iters sets the length


@dataclass(repr=False)
class Plan:
    """Estimates of one project, and advice for a budget."""

    project: Project
    budget: Budget
    steps: int | None  # run.max_iters, or the number of steps for the budget's tokens
    chosen: Estimate
    modes: dict[str, Estimate | str]  # checkpointing mode -> estimate or error message
    presets: dict[str, Estimate | str]  # other runner -> estimate or error message
    advice: Advice | None = None

    def fits(self, estimate: Estimate) -> bool | None:
        """Return whether a tenth of the device's memory stays free; None if the budget has no memory limit."""
        limit = self.budget.device_memory
        return None if limit is None else needs(estimate, self.project.device) <= USABLE * limit

    @property
    def tokens_per_step(self) -> int | None:
        """Number of tokens in a step; None if samples have no input_ids."""
        ids = (self.project.inputs or {}).get("input_ids")
        return None if ids is None else ids.numel() * self.chosen.batch.global_batch

    @property
    def rollouts(self) -> dict[str, int]:
        """Sizes of a rollout with the longest completions, and bytes on the fullest rank; empty: nothing is sampled."""
        batch, options = self.chosen.batch, self.project.rollouts
        if options is None:
            return {}
        completions, tokens = batch.global_batch * options.completions, options.max_new_tokens * options.turns
        return {
            "completions": completions,
            "tokens": completions * tokens,
            "forwards": batch.accumulation * tokens,
            "steps": batch.uses,
            **self.chosen.memory.sampling,
        }

    def days(self) -> float | None:
        """Return the duration of the whole run in days; None if its length or the speed is unknown."""
        if self.steps is None:
            return None
        if self.budget.tokens_per_second and self.tokens_per_step:
            return self.steps * self.tokens_per_step / self.budget.tokens_per_second / _DAY
        if self.budget.throughput:
            flops = self.project.flops(self.chosen.batch, self.chosen.mode)
            return self.steps * flops / (self.budget.throughput * self.chosen.world_size) / _DAY
        return None

    def as_json(self) -> dict[str, Any]:
        """Return the plan as JSON values: bytes, counts and days; unknown values are null."""
        sizes, chosen = self.project.sizes, self.chosen
        return {
            "runner": self.project.config.run.runner.name,
            "world_size": chosen.world_size,
            "device": self.project.device,
            "parameters": {
                "total": chosen.memory.parameters or sizes.elements,
                "without_padding": self.unpadded,
                "trainable": sizes.trainable_elements,
                "per_rank": chosen.memory.parameters_held,
            },
            "memory": self._memory_json(chosen),
            "gradient_checkpointing": {mode: self._memory_json(e) for mode, e in self.modes.items()},
            "active_parameters": self.unpadded - self.project.model.structure.idle_parameters,
            "flops_per_step": self.project.flops(chosen.batch, chosen.mode),
            "tokens_per_step": self.tokens_per_step,
            "rollouts": self.rollouts or None,
            "steps": self.steps,
            "days": self.days(),
            "batch": asdict(chosen.batch),
            "checkpoint_bytes": self.project.checkpoint_bytes,
            "bytes_sent_per_step_by_a_rank": chosen.sent,
            "pipeline_bubble": chosen.bubble,
            "runners": {name: self._memory_json(e) for name, e in self.presets.items()},
            "advice": asdict(self.advice) if self.advice else None,
            "activations_unknown_because": self.project.problem,
        }

    @property
    def unpadded(self) -> int:
        """Number of elements of all parameters in their logical shapes."""
        model = self.project.model
        return sum(model.weights.logical_shape(n, p.shape).numel() for n, p in model.weights.parameters().items())

    def _memory_json(self, estimate: Estimate | str) -> dict[str, Any]:
        if isinstance(estimate, str):
            return {"impossible": estimate}
        return {
            "device": estimate.memory.device,
            "device_total": estimate.memory.total,
            "host": estimate.memory.host,
            "rank": estimate.memory.kind or None,
            "other_ranks": [{"rank": m.kind, "device_total": m.total} for m in estimate.others],
            "parameters_per_rank": estimate.memory.parameters_held,
            "bytes_sent_per_step_by_a_rank": estimate.sent,
            "fits": self.fits(estimate),
        }

    def __repr__(self) -> str:
        """Return the plan as lines of text."""
        project, chosen, sizes = self.project, self.chosen, self.project.sizes
        idle = project.model.structure.idle_parameters
        batch, memory, tokens, run = chosen.batch, chosen.memory, self.tokens_per_step, project.config.run
        out = [
            f"{run.runner.name} on {chosen.world_size} x {project.device}, {run.amp.dtype}, "
            f"gradient checkpointing {chosen.mode}",
            "",
            f"parameters        {memory.parameters or sizes.elements:,} ({self.unpadded:,} without padding), "
            f"{sizes.trainable_elements:,} trained, {memory.parameters_held:,} on a rank"
            + (f", {self.unpadded - idle:,} active for a token" if idle else ""),
            f"step              {batch.global_batch:,} samples = {batch.micro_batch} micro batch x "
            f"{batch.accumulation} accumulation x {batch.dp_size} data-parallel ranks"
            + (f", {tokens:,} tokens" if tokens else ""),
            f"arithmetic        {show_number(project.flops(batch, chosen.mode))}FLOP per step, recomputation included",
            f"traffic           {show_bytes(chosen.sent)} sent by a rank per step",
            f"checkpoint        {show_bytes(project.checkpoint_bytes)}",
        ]
        out += [_rollout_lines(self.rollouts)] if self.rollouts else []
        if chosen.bubble:
            out.append(f"pipeline bubble   {chosen.bubble:.1%} of a step, if all stages take the same time")
        if self.steps is not None:
            days = self.days()
            time = f", {days:,.2f} days" if days is not None else "; give --throughput or --tokens-per-second for days"
            seen = f", {show_number(self.steps * tokens)} tokens" if tokens else ""
            out.append(f"length            {self.steps:,} steps{seen}{time}")
        out += ["", f"memory of the fullest rank{f', {memory.kind}' if memory.kind else ''}"]
        out += [f"  {name:<22}{show_bytes(size):>14}" for name, size in memory.device.items()]
        verdict, limit = self._verdict(chosen), show_bytes(self.budget.device_memory or 0)
        verdict += verdict and f" into nine tenths of {limit}"
        out.append(f"  {'device':<22}{show_bytes(memory.total):>14}{verdict}")
        out += [f"  {f'host: {name}':<27} {show_bytes(size):>8}" for name, size in memory.host.items()]
        out += ["", f"{'gradient checkpointing':<24}{'activations':>14}{'device':>14}{'host':>14}"]
        out += [f"  {mode:<21} {self._mode_row(estimate)}" for mode, estimate in self.modes.items()]
        if self.presets:
            out += ["", f"{'other runners':<38}{'device':>14}{'host':>14}{'sent per step':>16}{'parameters held':>18}"]
            possible = {name: other for name, other in self.presets.items() if isinstance(other, Estimate)}
            ranked = sorted(possible.items(), key=lambda preset: self._rank(preset[1]))
            out += [f"  {name:<35} {self._runner_row(estimate)}" for name, estimate in ranked]
            out.append("  sorted by fit, offloading and traffic; pipeline bubbles are not included")
            if refused := {name.split()[0]: None for name in self.presets if name not in possible}:
                why = f"impossible here (--options run.runner=NAME says why): {', '.join(refused)}"
                out += wrap(why, 100, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False)
        if project.problem:
            out += ["", f"activations and arithmetic are not included, because {project.problem}"]
        if project.absent:
            names = ", ".join(dict.fromkeys(project.absent))
            hint = f"; {found}" if (found := near(*map(Path, project.absent))) else ""
            out += [
                "",
                f"{names} is not on this machine: sizes come from the configuration, and training needs a local "
                f"folder or the hub's model{hint}",
            ]
        if self.advice is not None:
            out += ["", str(self.advice)]
        return "\n".join(out)

    def _verdict(self, estimate: Estimate) -> str:
        return {None: "", True: "  fits", False: "  does not fit"}[self.fits(estimate)]

    def _rank(self, estimate: Estimate) -> tuple[int, ...]:
        return self.fits(estimate) is False, bool(estimate.memory.host.keys() - {HOST_COPY}), estimate.sent

    def _mode_row(self, estimate: Estimate | str) -> str:
        if isinstance(estimate, str):
            return estimate
        sizes = estimate.memory.device.get("activations", 0), estimate.memory.total, estimate.memory.on_host
        return "".join(f"{show_bytes(size):>14}" for size in sizes) + self._verdict(estimate)

    def _runner_row(self, estimate: Estimate) -> str:
        memory = estimate.memory
        return (
            f"{show_bytes(memory.total):>14}{show_bytes(memory.on_host):>14}{show_bytes(estimate.sent):>16}"
            f"{memory.parameters_held:>18,}{self._verdict(estimate)}"
        )


def make_plan(project: Project, budget: Budget, world_size: int, others: Alternatives) -> Plan:
    """Estimate the project under its own runner and the alternatives.

    Raises UserError if the project's own runner cannot train the project.
    """

    def attempt(config: Config) -> Estimate | str:
        try:
            return project.estimate(config, world_size)
        except UserError as error:
            return str(error)

    config = project.config
    chosen = project.estimate(config, world_size)
    plan = Plan(
        project,
        budget,
        config.run.max_iters,
        chosen,
        modes={mode: attempt(with_options(config, mode=mode)) for mode in MODES},
        presets={
            name: other if isinstance(other, str) else attempt(with_same_samples(other, chosen.batch, world_size))
            for name, other in others.runners.items()
        },
    )
    if budget.tokens and plan.tokens_per_step:
        plan.steps = math.ceil(budget.tokens / plan.tokens_per_step)
    if budget.device_memory and not plan.fits(chosen):
        plan.advice = nearest(project, others, world_size, budget.device_memory)
    return plan


def _rollout_lines(made: dict[str, int]) -> str:
    """Describe `Plan.rollouts` in two lines."""
    return (
        f"rollouts          {made['completions']:,} completions, at most {made['tokens']:,} sampled tokens, every "
        f"{made['steps']} step{'s' * (made['steps'] > 1)}\n"
        f"{'':18}{made['forwards']:,} forwards of a rank, with {show_bytes(made['key/value cache'])} of keys and "
        f"values and {show_bytes(made['gathered parameters'])} of gathered parameters"
    )


def plan(
    project: ProjectLike,
    options: Overrides = (),
    *,
    world_size: int | None = None,
    presets: bool = True,
    device_memory: str | None = None,
    throughput: str | None = None,
    tokens_per_second: str | None = None,
    tokens: str | None = None,
) -> Plan:
    """Estimate memory, FLOPs and traffic of a project on `world_size` ranks, without starting any rank.

    The ranks do not have to exist. The last four arguments are strings in the command line's format, such as "24GiB".
    `print` shows the plan, and `Plan.as_json` returns it as JSON values. Raises UserError if no plan is possible.
    """
    budget = Budget(
        device_memory=read_bytes(device_memory, "--device-memory") if device_memory else None,
        throughput=read_number(throughput, "--throughput") if throughput else None,
        tokens_per_second=read_number(tokens_per_second, "--tokens-per-second") if tokens_per_second else None,
        tokens=read_number(tokens, "--tokens") if tokens else None,
    )
    config = load_config(project, options)
    size = world_size or Launch.detect(None, config.run.device).world_size
    check_layout(config, size, lambda n: f"{n} ranks fit" if world_size else f"--world-size {n} plans for {n} ranks")
    ready = dry_run(config, size)
    planned = Project(ready.config, ready.model, ready.sample, ready.absent)
    return make_plan(planned, budget, size, alternatives(project, options, planned, size, presets))


def alternatives(
    project: ProjectLike, options: Overrides, planned: Project, size: int, presets: bool = True
) -> Alternatives:
    """Return one configuration per runner in configs/, and a function that rebuilds the project with more settings."""

    def rebuild(settings: list[str]) -> Project:
        config = load_config(project, [*pairs(options), *settings])
        ready = dry_run(config, size)
        return Project(config, ready.model, planned.sample, ready.absent)

    found: dict[str, Config | str] = {}
    for name in preset_files("runner") if presets else ():
        try:
            found[name] = config = load_config(project, [*pairs(options), ("run.runner", name)])
            for option in runner_class(config.run).capabilities.saves_memory:
                found[f"{name} {option}"] = load_config(
                    project, [*pairs(options), f"run.runner={name}", f"run.runner.{option}"]
                )
        except UserError as error:
            found[name] = str(error)
    return Alternatives(found, rebuild)
