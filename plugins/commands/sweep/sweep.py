"""Runs of one project with different options, chosen by Optuna, in a folder that holds their results."""

import math
import os
import re
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from threading import Lock
from typing import Any, Literal

import yaml

from crosstrain import Run, UserError, load_config, require
from crosstrain.utils.processes import on_parents_death

_SELF = "crosstrain sweep"
_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
_RANGE = re.compile(rf"({_NUMBER})\.\.({_NUMBER})(:log)?")


@dataclass(frozen=True)
class Range:
    """Numbers from `low` to `high`, both included; whole numbers if both are."""

    low: float | int
    high: float | int
    log: bool  # every factor is equally likely, not every difference

    def draw(self, trial: Any, key: str) -> str:
        if isinstance(self.low, int):
            return str(trial.suggest_int(key, self.low, self.high, log=self.log))
        return f"{trial.suggest_float(key, self.low, self.high, log=self.log):.4g}"

    @property
    def ends(self) -> tuple[str, ...]:
        return str(self.low), str(self.high)


@dataclass(frozen=True)
class Choices:
    """Some values, as they would be written after `KEY=`."""

    values: tuple[str, ...]

    def draw(self, trial: Any, key: str) -> str:
        return str(trial.suggest_categorical(key, self.values))

    @property
    def ends(self) -> tuple[str, ...]:
        return self.values


Space = dict[str, Range | Choices]


@dataclass
class Sweep:
    """A sweep; `options` are those of every run, and `workers` are the ranks of a run."""

    project: str
    options: list[str]
    workers: int | None
    space: Space
    output: Path
    metric: str
    mode: Literal["min", "max"]
    _lock: Lock = field(default_factory=Lock)

    def check(self) -> None:
        """Load the configuration with the ends of each range and with each choice, before any run.

        Raises ConfigError for mistakes, and UserError for missing packages.
        """
        for module in ("optuna", "matplotlib"):
            require(module, _SELF)
        first = {key: values.ends[0] for key, values in self.space.items()}
        for key, values in self.space.items():
            for value in values.ends:
                config = load_config(self.project, [*self.options, *_given(first | {key: value})])
        if config.run.eval_interval is None and self.metric.startswith("val_"):
            raise UserError(f"--metric: {self.metric} needs validations; set run.eval_interval")

    @cached_property
    def _optuna(self) -> Any:
        optuna = require("optuna", _SELF)
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        return optuna

    @cached_property
    def study(self) -> Any:
        """The settings and results so far, in the file `sweep.journal`. Raises UserError if it is another sweep's."""
        journal = require("optuna.storages.journal", _SELF)
        self.output.mkdir(parents=True, exist_ok=True)
        storage = self._optuna.storages.JournalStorage(journal.JournalFileBackend(f"{self.output}/sweep.journal"))
        direction = "minimize" if self.mode == "min" else "maximize"
        study = self._optuna.create_study(storage=storage, study_name="sweep", direction=direction, load_if_exists=True)
        asked = {
            "project": self.project, "options": self.options, "metric": self.metric, "mode": self.mode,
            "search": {key: repr(values) for key, values in self.space.items()},
        }  # fmt: skip
        before = study.user_attrs.get("asked", asked)
        if changed := [key for key in asked if asked[key] != before[key]]:
            raise UserError(f"--output: {self.output} is a sweep with a different {changed[0]}; use a new folder")
        study.set_user_attr("asked", asked)
        return study

    def run(self, trials: int, at_a_time: int, sampler: str, seed: int) -> None:
        """Train until there are `trials` runs. Unfinished runs of an earlier call go on where they were."""
        unfinished = [trial.number for trial in self.study.trials if not trial.state.is_finished()]
        new = trials - len(self.study.trials)
        numbers: list[int | None] = [*unfinished, *[None] * max(new, 0)]  # None: a new run
        with ThreadPoolExecutor(at_a_time) as pool:
            list(pool.map(lambda n: self._train(self._ask(sampler, seed) if n is None else n), numbers))

    def _ask(self, sampler: str, seed: int) -> int:
        """Choose the settings of a new run, and return its number."""
        with self._lock:
            # A seed for each run, so that a continued sweep draws what it would have drawn.
            seed = 10_000 * seed + len(self.study.trials)
            kinds = self._optuna.samplers
            self.study.sampler = kinds.TPESampler(seed=seed) if sampler == "tpe" else kinds.RandomSampler(seed=seed)
            trial = self.study.ask()
            trial.set_user_attr("options", _given({k: values.draw(trial, k) for k, values in self.space.items()}))
            return int(trial.number)

    def _train(self, number: int) -> None:
        given, name = self.study.trials[number].user_attrs.get("options"), self.folder(number)
        value = self._value(given, name) if given else None
        with self._lock:
            self.study.tell(number, value, self._optuna.trial.TrialState.FAIL if value is None else None)
        result = "failed" if value is None else f"{self.metric} {value:.5g}"
        print(f"{name}: {result}  {' '.join(given or ())}", flush=True)

    def _value(self, given: list[str], name: str) -> float | None:
        """Train one run, and return its best value; None if it fails or has no finite value."""
        command = [sys.executable, "-m", "crosstrain", "train", "--cfg-path", self.project]
        command += ["--nproc-per-node", str(self.workers)] if self.workers else []
        command += ["--options", *self.options, *given, f"run.output_dir={self.output / name}"]
        with (self.output / f"{name}.log").open("ab") as log:
            bond = partial(on_parents_death, signal.SIGTERM, os.getpid())  # a killed sweep's runs save and end
            if subprocess.run(command, stdout=log, stderr=log, check=False, preexec_fn=bond).returncode:
                return None
        values = [row[self.metric] for row in Run(self.output / name).metrics if self.metric in row]
        return (min if self.mode == "min" else max)(filter(math.isfinite, values), default=None)

    @staticmethod
    def folder(number: int) -> str:
        return f"run_{number:03d}"

    @property
    def ranked(self) -> list[Any]:
        """The runs with a result, the best first. Raises UserError if there are none."""
        done = [trial for trial in self.study.trials if trial.value is not None]
        if not done:
            raise UserError(f"no run has a value of {self.metric}; see {self.output / self.folder(0)}.log")
        return sorted(done, key=lambda trial: trial.value, reverse=self.mode == "max")

    @property
    def best(self) -> Any:
        return self.ranked[0]

    def table(self) -> str:
        """Return the ranking as text; runs that failed are named below it."""
        rows = [["run", self.metric, *self.space]]
        for trial in self.ranked:
            settings = [option.partition("=")[2] for option in trial.user_attrs["options"]]
            rows.append([self.folder(trial.number), f"{trial.value:.5g}", *settings])
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
        failed = [self.folder(t.number) for t in self.study.trials if t.state.is_finished() and t.value is None]
        return "\n".join(lines + [f"failed: {', '.join(failed)}; see their .log files"] * bool(failed))

    def draw(self, path: Path) -> None:
        """Draw the metric against each option."""
        figure = require("matplotlib.figure", _SELF).Figure((4 * len(self.space), 3.5), layout="constrained")
        axes = figure.subplots(1, len(self.space), sharey=True, squeeze=False)[0]
        for axis, (key, values) in zip(axes, self.space.items(), strict=True):
            axis.scatter([trial.params[key] for trial in self.ranked], [trial.value for trial in self.ranked])
            axis.scatter([self.best.params[key]], [self.best.value], color="tab:red", label="best")
            axis.set_xlabel(key)
            if isinstance(values, Range) and values.log:
                axis.set_xscale("log")
        axes[0].set_ylabel(self.metric)
        axes[0].legend()
        figure.savefig(path)


def _given(settings: dict[str, str]) -> list[str]:
    return [f"{key}={value}" for key, value in settings.items()]


# ---- the argument of --search


def read_space(given: list[str]) -> Space:
    """Read arguments such as run.init_lr=1e-4..1e-2:log and model.dropout=0,0.1. Raises UserError for mistakes."""
    space: Space = {}
    for text in given:
        key, _, values = text.partition("=")
        if not (key and values) or key in space:
            raise UserError(f"--search: {text!r} is not a new KEY=LOW..HIGH[:log] or KEY=VALUE,VALUE")
        space[key] = _range(text, *found.groups()) if (found := _RANGE.fullmatch(values)) else _choices(text, values)
    return space


def _range(text: str, first: str, last: str, log: str | None) -> Range:
    whole = first.lstrip("+-").isdecimal() and last.lstrip("+-").isdecimal()
    low, high = (int(first), int(last)) if whole else (float(first), float(last))
    if low >= high or (log and low <= 0):
        raise UserError(f"--search: {text}: the first number must be lower{' and above 0' if log else ''}")
    return Range(low, high, bool(log))


def _choices(text: str, values: str) -> Choices:
    """Split at commas outside of brackets and quotes, as YAML does."""
    try:
        parsed = yaml.compose(f"[{values}]")
    except yaml.YAMLError:
        parsed = None
    if not isinstance(parsed, yaml.SequenceNode) or len(parsed.value) < 2:
        raise UserError(f"--search: {text!r} is neither KEY=LOW..HIGH[:log] nor KEY=VALUE,VALUE")
    return Choices(tuple(f"[{values}]"[n.start_mark.index : n.end_mark.index].strip() for n in parsed.value))
