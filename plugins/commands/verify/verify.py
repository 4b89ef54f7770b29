"""Acceptance test of a runner: compare it with plain PyTorch in every part of a run, and report the results."""

import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path

import torch

from crosstrain import Config, ProjectLike, UserError, __version__, find_checkpoint, load_config, sentence, to_plain
from crosstrain.config.run_options import DEFAULT_RUNNER
from crosstrain.config.sources import Overrides
from crosstrain.distributed.launch.worker_errors import WorkerFailure
from crosstrain.engine.build import model_on_meta
from crosstrain.utils.processes import main_hidden

from ..compare.compare import APART, Contestant, Race, make_contestants, refusal
from ..compare.diagnosis import diagnose
from ..compare.interruption import diagnose_interruption
from ..compare.tolerance import Record, Tolerance, difference, number_difference
from ..export.folder import export

_REFERENCE = f"{DEFAULT_RUNNER}@1"

Check = tuple[str, str, str]  # name, result (yes, no or not tried), and finding or reason for not trying


def page(checks: Mapping[str, Sequence[Check]], command: str) -> str:
    """Return a Markdown page with the checks of each runner, and the command that ran them."""
    lines = ["# Verified runners", "", f"By Crosstrain {__version__}, with torch {torch.__version__}: `{command}`"]
    for label, rows in checks.items():
        verdict = "**not verified**" if any(result == "no" for _, result, _ in rows) else "verified"
        lines += ["", f"## {label}: {verdict}", "", "| check | result | found |", "|---|---|---|"]
        lines += [
            f"| {name} | {'**no**' if result == 'no' else result} | {found.replace('|', '&#124;')} |"
            for name, result, found in rows
        ]
    return "\n".join(lines) + "\n"


def verify(
    project: ProjectLike, runners: Sequence[str], options: Overrides, nproc_per_node: int, steps: int
) -> Iterator[tuple[str, Check]]:
    """Compare runners, such as zero2@4, with plain torch on a single rank; yield (label, check) pairs.

    The checks cover every part of a run. A runner without a number of workers uses `nproc_per_node`. If `runners` is
    empty, the project's own runner is verified. Raises UserError if plain torch cannot train the project on one rank.
    """
    own = load_config(project, options).run.runner
    given = {f.name: value for f in fields(own.options) if (value := getattr(own.options, f.name)) != f.default}
    named = [*runners] or [json.dumps({"name": own.name} | to_plain(given)) if given else own.name]
    with tempfile.TemporaryDirectory(prefix="crosstrain-verify-") as folder, main_hidden():
        first, *others = make_contestants(project, options, [_REFERENCE, *named], nproc_per_node, Path(folder))
        race = Race(Path(folder), steps, deep=True)
        reference = race.begin(*first)
        for label, size, config in others:
            yield from ((label, row) for row in _Acceptance(race, first, *reference, label, size, config).checks())


@dataclass
class _Acceptance:
    """Checks that compare a runner with the recorded reference."""

    race: Race
    first: Contestant  # the reference
    reference: Record
    tolerance: Tolerance
    label: str
    size: int
    config: Config

    @property
    def plain(self) -> Config:
        """The configuration of the reference."""
        return self.first[2]

    def checks(self) -> Iterator[Check]:
        """Yield the checks in the order of a run. If training differs, skip the remaining checks."""
        other = next((n for n in (2 * self.size, self.size // 2) if not refusal(self.config, n)), 2 * self.size)
        rows: dict[str, Callable[[], tuple[str, str]]] = {
            "trains alike": self._train,
            "evaluates alike": self._evaluate,
            "saves its state": self._save,
            "resumes itself": partial(self._resume, self.size, self.config, self.config),
            f"resumes {_REFERENCE}": partial(self._resume, self.size, self.config, self.plain),
            f"{_REFERENCE} resumes it": partial(self._resume, 1, self.plain, self.config),
            f"resumes on {other} rank{'s' * (other > 1)}": partial(self._resume, other, self.config, self.config),
            "exports correctly": self._export,
            "the rest": self._rest,
        }
        for name, run in rows.items():
            try:
                result, found = run()
            except (UserError, WorkerFailure) as error:
                result, found = "no", f"it fails: {str(error).strip().splitlines()[-1]}"
            yield name, result, sentence(found)
            if name == "trains alike" and result == "no":
                return

    def _within(self, record: Record) -> str:
        if not record["exact"]:
            return APART
        off = max(number_difference(record, self.reference, key) for key in ("loss", "grad_norm"))
        return f"{len(record['rows'])} steps, losses and norms within {off:.0e}"

    def _train(self) -> tuple[str, str]:
        self.record = self.race.record(self.label, self.size, self.config, "contestant")
        self.tolerance = self.race.limits(self.record, self.first, self.tolerance)
        trained = self.record | {"plain_loss": self.reference["plain_loss"], "later_loss": None}
        self.finding = diagnose(trained, self.reference, self.tolerance)
        if self.finding and self.finding.phase not in ("checkpoint", "export"):
            return "no", self.finding.sentence
        rounding = f" (up to {self.tolerance.norms:.0e} is rounding)" if self.record["exact"] else ""
        return "yes", self._within(self.record) + rounding

    def _evaluate(self) -> tuple[str, str]:
        here, there = ([of["plain_loss"], of["later_loss"]] for of in (self.record, self.reference))
        if not self.record["exact"]:
            here, there = here[:1] * 2, there[:1] * 2
        if max(map(difference, here, there)) <= self.tolerance.losses:
            return "yes", f"loss {here[0]:.7g} before training, {here[1]:.7g} after it"
        return "no", f"losses {here[0]:.7g} and {here[1]:.7g} instead of {there[0]:.7g} and {there[1]:.7g}"

    def _save(self) -> tuple[str, str]:
        kept = "every tensor bit by bit, and the files beside them"
        return ("no", self.finding.sentence) if self.finding else ("yes", kept)

    def _resume(self, size: int, config: Config, earlier: Config) -> tuple[str, str]:
        """Resume from an earlier run's checkpoint, and compare the resumed run with the uninterrupted reference."""
        if why := refusal(config, size):
            return "not tried", str(why)
        if not self.record["exact"] and (size != self.size or config is self.plain):
            return "not tried", "each rank has its own optimizer state, which only the same number of ranks can resume"
        record = self.race.record(self.label, size, config, "contestant", earlier.run.output_dir, resumed=True)
        finding = diagnose(record, self.reference, self.tolerance, resumed=True)
        if config is self.config and size == self.size:
            finding = finding or diagnose_interruption(record, self.record)
        return ("no", finding.sentence) if finding else ("yes", f"the state bit by bit, then {self._within(record)}")

    def _export(self) -> tuple[str, str]:
        """Export the checkpoint, and load the exported model with plain torch in a new process."""
        folder, checkpoint = tempfile.mkdtemp(dir=self.race.scratch), find_checkpoint(Path(self.config.run.output_dir))
        export(checkpoint, Path(folder), None, 1 << 62, lambda _: None, model_on_meta(self.config))
        plain = self.plain.plain
        if "pretrained" not in plain["model"]:
            return "not tried", f"{plain['model']['arch']} has no option `pretrained` to load the export"
        plain["model"] |= {"pretrained": folder, "adapter": None}
        opened = Config.from_plain(plain)
        read = self.race.record(f"{self.label} read", 1, opened, "contestant", f"{folder}_read")["plain_loss"]
        found = f"loss {read:.7g} when loaded, {self.record['later_loss']:.7g} after training"
        return "yes" if difference(read, self.record["later_loss"]) <= self.tolerance.losses else "no", found

    def _rest(self) -> tuple[str, str]:
        rest = ["several machines", f"precisions other than {self.plain.run.amp.dtype}", "later steps"]
        rest += ["GPUs"] * (self.plain.run.device == "cpu" or not torch.cuda.is_available())
        rest += ["dropout, because nothing here is random"] * (not self.tolerance.random(self.reference))
        rest += ["gradient accumulation, because each rank has one micro batch"] * (self.record["accumulation"] == 1)
        return "not tried", "; ".join(rest)
