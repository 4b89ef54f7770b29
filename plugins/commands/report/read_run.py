"""Read run folders for a report. Files may be hostile, incomplete or damaged: all readable parts are used."""

import json
import os
import tempfile
from array import array
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from crosstrain import UserError
from crosstrain.checkpoint.run_folder import RunFolder
from crosstrain.config.yaml_text import Unreadable, parse
from crosstrain.monitor.metrics import leaves
from crosstrain.utils import storage
from crosstrain.utils.errors import first_line, os_errors_as
from crosstrain.utils.files import open_regular, read_end
from crosstrain.utils.units import is_number

_MOST_BYTES = 1 << 27  # maximum number of bytes read from metrics.jsonl
_LONGEST_LINE = 1 << 20  # bytes of a row; longer rows are skipped
_MOST_CURVES = 200
_MOST_EVENTS = 500
_MOST_SAMPLES = 200  # maximum number of evaluations with generated text
_LOG_LINES, _LOG_BYTES = 200, 1 << 16  # limits on the part read from the end of log.txt


@dataclass
class Curve:
    """Steps and their values; after `put_in_order`, each step occurs once, in ascending order."""

    steps: array = field(default_factory=lambda: array("q"))
    values: array = field(default_factory=lambda: array("d"))

    def add(self, step: int, value: float) -> None:
        self.steps.append(step)
        self.values.append(value)

    def put_in_order(self) -> bool:
        """Sort by step, keep only the last value of a repeated step, and return True if anything changed."""
        if all(a < b for a, b in zip(self.steps, self.steps[1:], strict=False)):
            return False
        ordered = sorted(dict(zip(self.steps, self.values, strict=True)).items())
        self.steps, self.values = array("q", (s for s, _ in ordered)), array("d", (v for _, v in ordered))
        return True


@dataclass
class ReadRun:
    """The contents of a run's folder."""

    folder: Path
    name: str = ""
    curves: dict[str, Curve] = field(default_factory=dict)  # key -> curve; keys of timers are timers/<phase>, in ms
    events: list[tuple[int, str]] = field(default_factory=list)  # (step, what happened)
    generated: list[tuple[int, list[tuple[str, str]]]] = field(default_factory=list)  # (step, [(prompt, text)])
    config: dict[str, str] = field(default_factory=dict)  # such as {"run.seed": "1234"}
    config_text: str = ""
    log_end: str = ""
    last_step: int = 0
    problems: list[str] = field(default_factory=list)  # sentences


def read_runs(folders: list[str]) -> list[ReadRun]:
    """Read runs, and give them distinct names; the problems of a run begin with its name.

    `problems` of the first run also lists the runs that cannot be read. Raises UserError if no run can be read, for
    example for a folder without metrics.jsonl.
    """
    runs, left_out = list[ReadRun](), list[UserError]()
    for folder in folders:
        try:
            runs.append(_read_anywhere(folder))
        except UserError as error:
            left_out.append(error)
    if not runs:
        raise left_out[0]
    for run, name in zip(runs, _names([run.folder for run in runs]), strict=True):
        run.name = name
        run.problems = [f"{name}: {problem}" for problem in run.problems]
    runs[0].problems += [f"left out: {error}" for error in left_out]
    return runs


def _read_anywhere(folder: str) -> ReadRun:
    if not storage.is_url(folder):
        return _read(Path(folder).expanduser())
    with tempfile.TemporaryDirectory() as place:
        copy = Path(place, *storage.local(folder).parts[1:])  # the last part is the run's name
        paths = RunFolder(copy)
        copy.mkdir(parents=True)
        limits = {paths.metrics: _MOST_BYTES + _LONGEST_LINE, paths.config: _LONGEST_LINE + 1, paths.log: _LOG_BYTES}
        for path, most in limits.items():
            with suppress(FileNotFoundError):
                path.write_bytes(storage.read_end(storage.join(folder, path.name), most, first=path != paths.log))
        return _read(copy)


def _names(folders: list[Path]) -> list[str]:
    """Return the shortest ends of the paths that are all distinct."""
    parts = [folder.resolve().parts for folder in folders]
    for length in range(1, max(map(len, parts)) + 1):
        names = ["/".join(p[-length:]) for p in parts]
        if len(set(names)) == len(names):
            return names
    return [f"{p[-1]} ({number})" for number, p in enumerate(parts, 1)]  # the same folder was named twice


def _read(folder: Path) -> ReadRun:
    paths = RunFolder(folder)
    if not paths.metrics.exists():
        raise UserError(f"{folder}: there is no metrics.jsonl; name a run's folder in which a step was logged")
    run = ReadRun(folder)
    unreadable = os_errors_as(UserError, f"{paths.metrics}: cannot be read")
    with unreadable, open_regular(paths.metrics, follow=False) as file:
        _read_rows(run, file)
        if file.tell() < os.fstat(file.fileno()).st_size:
            run.problems.append(f"metrics.jsonl is read up to {_MOST_BYTES} bytes; the rest is not shown")
    if any([curve.put_in_order() for curve in run.curves.values()]):
        run.problems.append("metrics.jsonl tells some steps twice or out of order; the later row counts")
    run.events = sorted(run.events[:_MOST_EVENTS])
    _read_config(run, paths)
    _read_log(run, paths.log)
    return run


# ---- metrics.jsonl


def _read_rows(run: ReadRun, file: Any) -> None:
    damaged: list[int] = []
    before: dict[str, Any] = {}
    for number, line in enumerate(_lines(file), 1):
        try:
            row = json.loads(line)
            step = row["step"]
            if type(step) is not int or not 0 <= step < 1 << 53:
                raise ValueError
        except (ValueError, KeyError, TypeError, RecursionError):
            damaged.append(number)
            continue
        run.last_step = max(run.last_step, step)
        _add(run, step, row)
        _note_events(run, step, row, before)
        before |= {key: row[key] for key in ("skipped_steps", "loss_scale") if key in row}
    if damaged:
        where = "the last line" if damaged == [number] else f"{len(damaged)} lines, the first of them {damaged[0]},"
        run.problems.append(
            f"metrics.jsonl: {where} could not be read, as when a run was killed or is being written; the rest is shown"
        )


def _lines(file: Any) -> Iterator[bytes]:
    """Yield lines; a line that is too long becomes an empty one."""
    while file.tell() < _MOST_BYTES and (line := file.readline(_LONGEST_LINE)):
        too_long = len(line) == _LONGEST_LINE and not line.endswith(b"\n")
        while too_long and not line.endswith(b"\n") and line:
            line = file.readline(_LONGEST_LINE)
        yield b"" if too_long else line


def _add(run: ReadRun, step: int, row: dict[str, Any]) -> None:
    numbers = {key: value for key, value in row.items() if key not in ("step", "timers")}
    if isinstance(timers := row.get("timers"), dict):
        numbers |= {f"timers/{phase}": value for phase, value in timers.items()}
    for key, value in numbers.items():
        if (number := _number(value)) is None:
            continue
        if key not in run.curves and len(run.curves) == _MOST_CURVES:
            problem = f"metrics.jsonl has more than {_MOST_CURVES} kinds of numbers; the first ones are shown"
            run.problems += [problem] if problem not in run.problems else []
            continue
        run.curves.setdefault(key, Curve()).add(step, number)
    if isinstance(generated := row.get("generated"), list) and len(run.generated) < _MOST_SAMPLES:
        pairs = [(str(s.get("prompt")), str(s.get("text"))) for s in generated if isinstance(s, dict)]
        run.generated += [(step, pairs)] if pairs else []


def _number(value: Any) -> float | None:
    return float(value) if is_number(value) else None


def _note_events(run: ReadRun, step: int, row: dict[str, Any], before: dict[str, Any]) -> None:
    if len(run.events) > _MOST_EVENTS:
        return
    if "loss" in row and _number(row["loss"]) is None:
        run.events.append((step, "the loss was not finite"))
    now, then = _number(row.get("skipped_steps")), _number(before.get("skipped_steps")) or 0
    if now is not None and now > then:
        run.events.append((step, f"{now - then:.0f} skipped since the row before, {now:.0f} in all"))
    now, was = _number(row.get("loss_scale")), _number(before.get("loss_scale"))
    if None not in (now, was) and now != was:
        run.events.append((step, f"loss scale {was:g} became {now:g}"))
    if isinstance(notes := row.get("notes"), list):
        run.events += [(step, str(note)) for note in notes]


# ---- config.yaml and log.txt


def _read_config(run: ReadRun, paths: RunFolder) -> None:
    try:
        run.config_text = paths.read_config()
        tree, _ = parse(run.config_text)
        if not isinstance(tree, dict):
            raise Unreadable("it is not a mapping")
        run.config = {key: v if isinstance(v, str) else json.dumps(v) for key, v in leaves(tree)}
    except (OSError, Unreadable) as error:
        run.problems.append(f"config.yaml could not be read ({first_line(error)})")


def _read_log(run: ReadRun, path: Path) -> None:
    try:
        run.log_end = "\n".join(read_end(path, _LOG_BYTES)[-_LOG_LINES:])
    except OSError as error:
        run.problems.append(f"log.txt could not be read ({error.strerror})")
