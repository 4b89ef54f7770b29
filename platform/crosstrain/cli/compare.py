"""`crosstrain compare`: do these runners train alike? A few steps of a project under each, and a verdict."""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from crosstrain.compare.diagnosis import Record, Tolerance, diagnose, difference, largest, number_difference
from crosstrain.compare.worker import compare_worker
from crosstrain.config.load import Config, load_config
from crosstrain.distributed.launch.launcher import Launch, launch
from crosstrain.distributed.launch.worker_errors import WorkerFailure
from crosstrain.engine.build import batch_plan
from crosstrain.train.preflight import check
from crosstrain.utils.errors import UserError

_Contestant = tuple[str, int, Config | UserError]  # label, workers, and how it trains or why it cannot


def compare(arguments: argparse.Namespace) -> int:
    """Compare `arguments.runners`, the first being the reference; returns 0 if all agree.

    Raises UserError if one does not, and for a project that none can train.
    """
    if len(arguments.runners) < 2:
        raise UserError("--runners: name at least two, such as ddp@1 fsdp@2; the first is what the others are held to")
    if arguments.output and not Path(arguments.output).absolute().parent.is_dir():
        raise UserError(f"--output: {Path(arguments.output).parent} is not a folder")
    if arguments.scratch and not Path(arguments.scratch).is_dir():
        raise UserError(f"--scratch: {arguments.scratch} is not a folder")
    contestants = [_sized(text, arguments.nproc_per_node) for text in arguments.runners]
    with tempfile.TemporaryDirectory(prefix="crosstrain-compare-", dir=arguments.scratch) as scratch:
        configs = _configs(arguments, contestants, Path(scratch))
        comparison = _Comparison(Path(scratch), arguments.steps, configs)
        failures = comparison.run()
    if arguments.output:
        Path(arguments.output).write_text(json.dumps(comparison.results, indent=1) + "\n", encoding="utf-8")
    if failures:
        raise UserError(
            f"{len(failures)} of {len(contestants) - 1} do not train as {arguments.runners[0]}: {', '.join(failures)}"
        )
    print(f"all train as {arguments.runners[0]}")
    return 0


def _sized(text: str, nproc: int | None) -> tuple[str, int]:
    """`zero2@4` as the runner and its number of workers."""
    runner, _, size = text.partition("@")
    if not runner or (size and not (size.isdecimal() and int(size) > 0)):
        raise UserError(f"--runners: {text!r} is not a runner, or a runner and its number of workers such as zero2@2")
    return runner, int(size) if size else nproc or 1


def _configs(
    arguments: argparse.Namespace, contestants: list[tuple[str, int]], scratch: Path
) -> list[_Contestant]:
    """A checked configuration for each contestant, with the same global and micro batch for all, or why it cannot run.

    Raises UserError where the first cannot.
    """

    def load(runner: str, *more: str) -> Config:
        return load_config(arguments.cfg_path, [*arguments.options, f"run.runner={runner}", *more])

    loaded = [(load(runner), size) for runner, size in contestants]
    plans = [batch_plan(config, size) for config, size in loaded]
    run = loaded[0][0].run
    total = run.global_batch_size or max(plan.global_batch for plan in plans)
    micro = run.micro_batch_size or min(plan.micro_batch for plan in plans)
    batch = (f"run.global_batch_size={total}", f"run.micro_batch_size={micro}", "run.accum_grad_iters=null")
    out: list[_Contestant] = []
    for number, ((runner, size), label) in enumerate(zip(contestants, _labels(arguments.runners), strict=True)):
        config = load(runner, *batch, f"run.output_dir={scratch}/run{number}", "run.eval_interval=null",
                      "run.trackers=[]")  # fmt: skip
        try:
            check(config, size)
        except UserError as error:
            if number == 0:
                raise
            out.append((label, size, error))
        else:
            out.append((label, size, config))
    return out


def _labels(runners: list[str]) -> list[str]:
    """The contestants as they were named; one that is named again has its number behind it."""
    counts = [runners[:i].count(name) for i, name in enumerate(runners)]
    return [f"{name} ({count + 1})" if count else name for name, count in zip(runners, counts, strict=True)]


class _Comparison:
    """Runs the contestants one after the other and prints what they did."""

    def __init__(self, scratch: Path, steps: int, configs: list[_Contestant]) -> None:
        self.scratch, self.steps, self.configs = scratch, steps, configs
        self.results: dict[str, Any] = {}

    @property
    def _reference(self) -> tuple[str, int, Config]:
        label, size, config = self.configs[0]
        assert isinstance(config, Config)
        return label, size, config

    def run(self) -> list[str]:
        """Names of the contestants that failed or differ."""
        label, size, config = self._reference
        try:
            reference = self._record(label, size, config, is_reference=True)
        except UserError as error:
            raise UserError(f"the reference {label} cannot train: {error}") from error
        if reference.rows[-1]["skipped_steps"] >= len(reference.rows):
            raise UserError(
                f"every step of the reference {label} overflowed and was skipped, so there is nothing to compare; "
                f"begin with a smaller loss scale, such as --options run.amp.initial_scale=1024"
            )
        noise = self._noise(reference)
        tolerance = Tolerance.of(config.run.amp.dtype, noise)
        print(
            f"reference {label}: {self.steps} steps, {config.run.amp.dtype}; differences up to {tolerance.numbers:.1e}"
        )
        print(
            f"in losses and norms, and {tolerance.gradients:.1e} of each gradient's norm in step 1, are rounding",
            end="",
        )
        print(f" (noise of the reference itself: {noise:.1e})\n" if noise else "\n")
        self._show(reference, reference)
        failures = []
        for label, size, made in self.configs[1:]:
            try:
                if isinstance(made, UserError):
                    raise made
                record = self._record(label, size, made)
            except (UserError, WorkerFailure) as error:
                print(f"{label}: failed: {error}\n")
                self.results[label] = {"error": str(error)}
                failures.append(label)
                continue
            self._show(record, reference)
            problem = diagnose(record, reference, tolerance)
            print(f"  {'DIFFERS: ' + problem if problem else 'trains alike'}\n")
            self.results[label]["problem"] = problem
            if problem:
                failures.append(label)
        self._summary(reference)
        return failures

    def _record(
        self, label: str, size: int, config: Config, is_reference: bool = False, reverse: bool = False
    ) -> Record:
        result = self.scratch / "result.json"
        job = {
            "folder": str(self.scratch / "reference"), "steps": self.steps, "is_reference": is_reference,
            "reverse": reverse, "result": str(result),
        }  # fmt: skip
        if launch(compare_worker, (config.plain, job), Launch(size, True, False, True)):
            raise UserError("stopped before everything was compared")
        record = Record(label, json.loads(result.read_text()))
        self.results[label] = record.data
        return record

    def _noise(self, reference: Record) -> float:
        """Difference between the reference and itself with its micro batches in reverse order; 0 if it has but one."""
        if reference.data["accumulation"] == 1:
            return 0.0
        label, size, config = self._reference
        plain = config.plain
        plain["run"]["output_dir"] += "_reversed"
        record = self._record(f"{label} reversed", size, Config.from_plain(plain), reverse=True)
        return max(number_difference(record, reference, key) for key in ("loss", "grad_norm"))

    def _show(self, record: Record, reference: Record) -> None:
        print(f"{record.name}")
        print("  step           loss      grad norm   loss diff.   norm diff.   largest gradient difference")
        for number, (mine, theirs) in enumerate(zip(record.rows, reference.rows, strict=True), 1):
            size, name = largest(record, number)
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
        for label, data in self.results.items():
            if "rows" not in data:
                print(f"{label:{width}} failed")
                continue
            record = Record(label, data)
            seconds = statistics.median(row["seconds"] for row in record.rows)
            print(
                f"{label:{width}} {number_difference(record, reference, 'loss'):12.1e}"
                f" {number_difference(record, reference, 'grad_norm'):12.1e} {data['memory_mb']:10.0f} MB"
                f" {1000 * seconds:8.0f} ms"
            )


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.7g}"
