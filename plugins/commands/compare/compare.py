"""Train the same steps under several runners, one after the other, and print differences from the first runner."""

import json
import multiprocessing
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from crosstrain import Config, ProjectLike, UserError, find_checkpoint, load_config
from crosstrain.checkpoint.files import Reader
from crosstrain.config.sources import Overrides, pairs
from crosstrain.distributed.launch.launch import Launch
from crosstrain.distributed.launch.launcher import launch
from crosstrain.distributed.launch.worker_errors import WorkerFailure
from crosstrain.engine.checks import batch_plan
from crosstrain.inference.open_checkpoint import outline
from crosstrain.training.preflight import preflight
from crosstrain.utils.assets import GENERATION_CONFIG
from crosstrain.utils.processes import main_hidden

from ..plan.estimate import Project
from .diagnosis import diagnose
from .interruption import diagnose_interruption
from .tolerance import EXACT, Record, Tolerance, difference, largest, same_forward
from .worker import Job, Role, compare_worker

Contestant = tuple[str, int, Config]  # label, number of workers, configuration
RESUMED = 2  # number of steps to train after a resume
APART = "its ranks step independently, so losses and updates are not compared; all else agrees"


class Comparison(NamedTuple):
    """Labels of the runners that failed or differ from the first one, and all measurements by label."""

    different: list[str]
    results: dict[str, Any]


def compare(
    project: ProjectLike,
    runners: Sequence[str],
    options: Overrides = (),
    *,
    nproc_per_node: int | None = None,
    steps: int = 5,
    deep: bool = False,
    scratch: str | Path | None = None,
) -> Comparison:
    """Train `steps` steps under each of `runners`, such as zero2@4, and print how the others differ from the first.

    A runner without a number of workers uses `nproc_per_node` (default: 1). `deep`: each runner also evaluates, saves
    and resumes. `scratch`: existing folder for temporary files. Raises UserError if the first runner cannot train the
    project.
    """
    if len(runners) < 2:
        raise UserError("--runners: expected at least two, such as ddp@1 fsdp@2; the first is the reference")
    with tempfile.TemporaryDirectory(prefix="crosstrain-compare-", dir=scratch) as folder, main_hidden():
        contestants = make_contestants(project, options, runners, nproc_per_node or 1, Path(folder))
        race = Race(Path(folder), steps, deep)
        return Comparison(race.run(contestants), race.results)


def _sized(text: str, nproc: int) -> tuple[str, int]:
    """Split `zero2@4` into the runner and its number of workers; the default is `nproc`."""
    runner, _, size = text.partition("@")
    if not runner or (size and not (size.isdecimal() and int(size) > 0)):
        raise UserError(
            f"--runners: expected a runner, or a runner and its number of workers such as zero2@2, got {text!r}"
        )
    return runner, int(size) if size else nproc


def make_contestants(
    project: ProjectLike, options: Overrides, runners: Sequence[str], nproc: int, scratch: Path
) -> list[Contestant]:
    """Load a configuration for each runner; all have equal global and micro batch sizes.

    If a runner is listed twice, its second label ends with (2). A runner without a number of workers uses `nproc`.
    """
    sized = [_sized(text, nproc) for text in runners]

    def load(runner: str, more: Mapping[str, Any]) -> Config:
        ((key, value),) = pairs([f"run.runner={runner}"])
        whole = isinstance(value, Mapping) and "name" in value  # a plain name keeps the project's runner options
        return load_config(project, [*pairs(options), (key, value), *more.items()], ("run", "runner") if whole else ())

    loaded = [load(runner, {}) for runner, _ in sized]
    plans = [batch_plan(config, size) for config, (_, size) in zip(loaded, sized, strict=True)]
    common: dict[str, Any] = {
        "run.global_batch_size": loaded[0].run.global_batch_size or max(plan.global_batch for plan in plans),
        "run.micro_batch_size": loaded[0].run.micro_batch_size or min(plan.micro_batch for plan in plans),
        "run.accum_grad_iters": None, "run.eval_interval": None, "run.save_in_background": False,
        "run.trackers": [], "run.callbacks": [], "run.metrics": [],
    }  # fmt: skip
    out: list[Contestant] = []
    for number, (runner, size) in enumerate(sized):
        again = runners[:number].count(runners[number])
        label = f"{runners[number]} ({again + 1})" if again else runners[number]
        out.append((label, size, load(runner, common | {"run.output_dir": f"{scratch}/run{number}"})))
    return out


def refusal(config: Config, size: int) -> UserError | None:
    """Return the error if the runner cannot train the project on `size` workers, else None."""
    try:
        ready = preflight(config, size)
        if ready.runner.capabilities.cuts_models:
            Project(config, ready.model, ready.sample).check_layouts(ready.plan, size)
    except UserError as error:
        return error
    return None


@dataclass
class Race:
    """Trains contestants one after the other and compares each with the first one."""

    scratch: Path
    steps: int
    deep: bool
    results: dict[str, Any] = field(default_factory=dict)  # label -> measurements
    _narrow: Tolerance | None = None

    def begin(self, label: str, size: int, config: Config) -> tuple[Record, Tolerance]:
        """Record the reference and its noise. Raises UserError if the reference cannot train."""
        try:
            reference = self.record(label, size, config, "reference")
        except UserError as error:
            raise UserError(f"the reference {label} cannot train: {error}") from error
        if reference["rows"][-1]["skipped_steps"] >= len(reference["rows"]):
            raise UserError(
                f"every step of the reference {label} overflowed and was skipped, so there is nothing to compare; "
                f"begin with a smaller loss scale, such as --options run.amp.initial_scale=1024"
            )
        if config.run.bitwise.enabled:
            print(f"reference {label}: {len(reference['rows'])} steps; run.bitwise is set, so all bits must be equal\n")
            return reference, EXACT
        noise = self.record(f"{label} (noise)", size, config, "noise", f"{config.run.output_dir}_noise")
        dtype = config.run.amp.dtype
        tolerance = Tolerance.of(dtype, reference, noise)
        print(
            f"reference {label}: {len(reference['rows'])} steps, {dtype}; differences up to {tolerance.losses:.1e} in "
            f"losses\nand up to {tolerance.norms:.1e} in gradient norms count as rounding\n"
        )
        return reference, tolerance

    def limits(self, record: Record, first: Contestant, tolerance: Tolerance) -> Tolerance:
        """Return the limits for a run: narrow ones if its forward has the same bits as that of the reference `first`.

        The noise of the narrow limits is measured when it is first needed.
        """
        label, size, config = first
        reference = self.results[label]
        if tolerance.is_exact or config.run.amp.dtype == "fp32" or not same_forward(record, reference):
            return tolerance
        if self._narrow is None:
            noise = self.record(
                f"{label} (noise of sums)", size, config, "noise of sums", f"{config.run.output_dir}_sums"
            )
            self._narrow = Tolerance.of(config.run.amp.dtype, reference, noise, narrow=True)
        return self._narrow

    def run(self, contestants: list[Contestant]) -> list[str]:
        """Compare all contestants with the first one; return the labels of those that failed or differ.

        With `deep`, contestants that train alike are also resumed.
        """
        label = contestants[0][0]
        reference, tolerance = self.begin(*contestants[0])
        self._show(label, reference)
        failures = []
        for label, size, config in contestants[1:]:
            what = "failed"
            try:
                record = self.record(label, size, config, "contestant")
                self._show(label, reference)
                limits = self.limits(record, contestants[0], tolerance)
                finding = diagnose(record, reference, limits)
                if self.deep and finding is None:
                    what = "trains alike, but a resume failed"
                    resumed = self.record(label, size, config, "contestant", resumed=True)
                    self.results[label] = record | {"resumed": resumed}
                    finding = diagnose(resumed, reference, limits, resumed=True)
                    finding = finding or diagnose_interruption(resumed, record)
            except (UserError, WorkerFailure) as error:
                print(f"{label}: {what}: {error}\n")
                self.results[label] = self.results.get(label, {}) | {"error": str(error)}
                failures.append(label)
                continue
            alike = "trains alike" if self.results[label]["exact"] else APART
            print(f"  {f'DIFFERS: {finding.sentence}' if finding else alike}\n")
            self.results[label] |= {"problem": finding and finding.sentence, "finding": finding and asdict(finding)}
            failures += [label] if finding else []
        return failures

    def record(self, label: str, size: int, config: Config, role: Role, at: str = "", resumed: bool = False) -> Record:
        """Train a contestant, or resume its training, in its folder or in `at`. Raises UserError or WorkerFailure."""
        if not resumed and (why := refusal(config, size)):
            raise why
        plain = config.plain
        plain["run"]["output_dir"] = at or config.run.output_dir
        job = Job(
            role,
            self.scratch / "reference",
            steps=RESUMED if resumed else self.steps + RESUMED * self.deep,
            evaluate_after=self.steps if self.deep else 0,
            save=self.deep and role in ("reference", "contestant") and not resumed,
            resumed=resumed,
            uneven=self.deep,
        )
        result = self.scratch / "result.json"
        # The fork server imports the slow modules once, so that workers start faster.
        models = [name for name in sys.modules if name.startswith("transformers.models.")]
        multiprocessing.set_forkserver_preload([compare_worker.__module__, *models])
        if launch(compare_worker, (plain, job, result), Launch(size, True, False, True, start_method="forkserver")):
            raise UserError("stopped before the comparison was complete")
        record = self.results[label] = json.loads(result.read_text())
        if "error" not in record.get("saved", {"error": None}):
            record["strange_files"] = strange_files(config, find_checkpoint(Path(plain["run"]["output_dir"])))
        return record

    def _show(self, label: str, reference: Record) -> None:
        record = self.results[label]
        print(label)
        print("  step           loss      grad norm   loss diff.   norm diff.   largest gradient difference")
        for mine, theirs, step in zip(record["rows"], reference["rows"], record["steps"], strict=False):
            size, name = largest(step)
            print(
                f"  {mine['step']:4d} {_number(mine['loss']):>14} {_number(mine['grad_norm']):>14}"
                f" {difference(mine['loss'], theirs['loss']):12.1e}"
                f" {difference(mine['grad_norm'], theirs['grad_norm']):12.1e}"
                f"   {size:.1e} {name if size else ''}",
                flush=True,
            )


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.7g}"


def strange_files(config: Config, checkpoint: Path) -> dict[str, str]:
    """Return file name -> difference for the files of a checkpoint, such as config.json, that are not as expected."""
    reader, model = Reader.open(checkpoint), outline(config, checkpoint)
    with tempfile.TemporaryDirectory() as temporary:
        fresh = Path(temporary)
        model.export.save_config(fresh)
        model.export.save_parts(fresh, reader.names("param"), reader.whole)
        # Skip the generation configuration, because the dataset adds stop tokens to this file.
        paths = [path for path in sorted(fresh.iterdir()) if path.name != GENERATION_CONFIG]
        return {path.name: what for path in paths if (what := _difference(checkpoint / path.name, path))}


def _difference(path: Path, expected: Path) -> str | None:
    if not path.exists():
        return "is missing"
    if path.read_bytes() == expected.read_bytes():
        return None
    if path.suffix == ".json":
        mine, theirs = json.loads(path.read_text()), json.loads(expected.read_text())
        for key in sorted(mine.keys() | theirs.keys()):
            if mine.get(key) != theirs.get(key):
                return f"has {key} {json.dumps(mine.get(key))} instead of {json.dumps(theirs.get(key))}"
    return "has different contents"
