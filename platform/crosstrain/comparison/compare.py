"""Train the same steps under several runners, one after the other, and print how they differ from the first."""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from crosstrain.comparison.diagnosis import Record, Tolerance, diagnose, difference, largest, number_difference
from crosstrain.comparison.worker import compare_worker
from crosstrain.config.load import Config, ProjectLike, load_config
from crosstrain.config.sources import Overrides, pairs
from crosstrain.distributed.launch.launcher import Launch, launch
from crosstrain.distributed.launch.worker_errors import WorkerFailure
from crosstrain.engine.build import batch_plan
from crosstrain.planning.estimate import Project
from crosstrain.training.preflight import preflight
from crosstrain.utils.errors import UserError
from crosstrain.utils.processes import main_hidden

_Contestant = tuple[str, int, Config]  # label, number of workers


class Comparison(NamedTuple):
    """The runners that do not train as the first one, and the measurements of each by label."""

    different: list[str]
    results: dict[str, Any]


def compare(
    project: ProjectLike, runners: Sequence[str], options: Overrides = (), *, nproc_per_node: int | None = None,
    steps: int = 5, scratch: str | Path | None = None,
) -> Comparison:  # fmt: skip
    """Train `steps` steps under each of `runners`, such as zero2@4, compare them with the first one, and print tables.

    A runner without a number of workers gets `nproc_per_node`, or one. `scratch`: folder for the reference's gradients.
    Raises UserError for a project that the first runner cannot train.
    """
    if len(runners) < 2:
        raise UserError("--runners: name at least two, such as ddp@1 fsdp@2; the first is what the others are held to")
    sized = [_sized(text, nproc_per_node) for text in runners]
    with tempfile.TemporaryDirectory(prefix="crosstrain-compare-", dir=scratch) as folder, main_hidden():
        contestants = _contestants(project, options, runners, sized, Path(folder))
        race = _Race(Path(folder), steps)
        return Comparison(race.run(contestants), race.results)


def _sized(text: str, nproc: int | None) -> tuple[str, int]:
    """`zero2@4` as the runner and its number of workers."""
    runner, _, size = text.partition("@")
    if not runner or (size and not (size.isdecimal() and int(size) > 0)):
        raise UserError(f"--runners: {text!r} is not a runner, or a runner and its number of workers such as zero2@2")
    return runner, int(size) if size else nproc or 1


def _contestants(
    project: ProjectLike, options: Overrides, runners: Sequence[str], sized: list[tuple[str, int]], scratch: Path
) -> list[_Contestant]:
    """A configuration for each runner, with one global and one micro batch for all.

    A runner that is named again has a number behind its label.
    """

    def load(runner: str, more: Mapping[str, Any]) -> Config:
        return load_config(project, [*pairs([*pairs(options), f"run.runner={runner}"]), *more.items()])

    loaded = [load(runner, {}) for runner, _ in sized]
    plans = [batch_plan(config, size) for config, (_, size) in zip(loaded, sized, strict=True)]
    total = loaded[0].run.global_batch_size or max(plan.global_batch for plan in plans)
    micro = loaded[0].run.micro_batch_size or min(plan.micro_batch for plan in plans)
    common: dict[str, Any] = {
        "run.global_batch_size": total, "run.micro_batch_size": micro, "run.accum_grad_iters": None,
        "run.eval_interval": None, "run.trackers": [], "run.callbacks": [], "run.metrics": [],
    }  # fmt: skip
    out: list[_Contestant] = []
    for number, (runner, size) in enumerate(sized):
        again = runners[:number].count(runners[number])
        label = f"{runners[number]} ({again + 1})" if again else runners[number]
        out.append((label, size, load(runner, common | {"run.output_dir": f"{scratch}/run{number}"})))
    return out


def _check(config: Config, size: int) -> None:
    """Raise UserError where the runner cannot train the project on so many workers."""
    ready = preflight(config, size)
    if ready.runner.cuts_models:
        Project(config, ready.model, ready.sample).check_layouts(ready.plan, size)


@dataclass
class _Race:
    """Runs the contestants one after the other and prints their numbers."""

    scratch: Path
    steps: int
    results: dict[str, Any] = field(default_factory=dict)  # by label

    def run(self, contestants: list[_Contestant]) -> list[str]:
        """Compare with the first one; returns the labels of the contestants that failed or differ."""
        label, size, config = contestants[0]
        _check(config, size)
        try:
            reference = self._record(label, size, config, is_reference=True)
        except UserError as error:
            raise UserError(f"the reference {label} cannot train: {error}") from error
        if reference["rows"][-1]["skipped_steps"] >= len(reference["rows"]):
            raise UserError(
                f"every step of the reference {label} overflowed and was skipped, so there is nothing to compare; "
                f"begin with a smaller loss scale, such as --options run.amp.initial_scale=1024"
            )
        noise = 0.0
        if reference["accumulation"] > 1:  # the reference against itself, its micro batches in reverse order
            plain = config.plain
            plain["run"]["output_dir"] += "_reversed"
            record = self._record(f"{label} reversed", size, Config.from_plain(plain), reverse=True)
            noise = max(number_difference(record, reference, key) for key in ("loss", "grad_norm"))
        dtype = config.run.amp.dtype
        tolerance = Tolerance.of(dtype, noise)
        print(
            f"reference {label}: {self.steps} steps, {dtype}; differences up to {tolerance.numbers:.1e}\n"
            f"in losses and norms, and {tolerance.gradients:.1e} of each gradient's norm in step 1, are rounding"
            + (f" (noise of the reference itself: {noise:.1e})\n" if noise else "\n")
        )
        self._show(label, reference)
        failures = []
        for label, size, config in contestants[1:]:
            try:
                _check(config, size)
                record = self._record(label, size, config)
            except (UserError, WorkerFailure) as error:
                print(f"{label}: failed: {error}\n")
                self.results[label] = {"error": str(error)}
                failures.append(label)
                continue
            self._show(label, reference)
            problem = diagnose(record, reference, tolerance)
            print(f"  {'DIFFERS: ' + problem if problem else 'trains alike'}\n")
            self.results[label]["problem"] = problem
            failures += [label] if problem else []
        self._summary(reference)
        return failures

    def _record(
        self, label: str, size: int, config: Config, is_reference: bool = False, reverse: bool = False
    ) -> Record:
        result = self.scratch / "result.json"
        job = {
            "folder": self.scratch / "reference", "steps": self.steps, "is_reference": is_reference,
            "reverse": reverse, "result": result,
        }  # fmt: skip
        if launch(compare_worker, (config.plain, job), Launch(size, True, False, True)):
            raise UserError("stopped before everything was compared")
        self.results[label] = json.loads(result.read_text())
        return self.results[label]

    def _show(self, label: str, reference: Record) -> None:
        record = self.results[label]
        print(label)
        print("  step           loss      grad norm   loss diff.   norm diff.   largest gradient difference")
        for mine, theirs, sums in zip(record["rows"], reference["rows"], record["gradients"], strict=True):
            size, name = largest(sums)
            print(
                f"  {mine['step']:4d} {_number(mine['loss']):>14} {_number(mine['grad_norm']):>14}"
                f" {difference(mine['loss'], theirs['loss']):12.1e}"
                f" {difference(mine['grad_norm'], theirs['grad_norm']):12.1e}"
                f"   {size:.1e} {name if size else ''}",
                flush=True,
            )

    def _summary(self, reference: Record) -> None:
        width = max(map(len, self.results))
        print(f"{'runner':{width}} {'loss diff.':>12} {'norm diff.':>12} {'memory/rank':>13} {'time/step':>11}")
        for label, record in self.results.items():
            if "rows" not in record:
                print(f"{label:{width}} failed")
                continue
            seconds = statistics.median(row["seconds"] for row in record["rows"])
            print(
                f"{label:{width}} {number_difference(record, reference, 'loss'):12.1e}"
                f" {number_difference(record, reference, 'grad_norm'):12.1e} {record['memory_mb']:10.0f} MB"
                f" {1000 * seconds:8.0f} ms"
            )


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.7g}"
