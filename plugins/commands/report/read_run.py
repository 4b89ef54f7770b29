"""Read run folders for a report. Files may be hostile, incomplete or damaged: all readable parts are used."""

import json
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any

from crosstrain import UserError, first_line, is_number, open_regular, os_errors_as, read_end
from crosstrain.checkpoint.run_folder import RunFolder
from crosstrain.config.yaml_text import Unreadable, parse
from crosstrain.monitor.metrics import leaves
from crosstrain.utils import storage

from ..status.status import read_row

_MOST_BYTES = 1 << 27  # maximum number of bytes read from metrics.jsonl
_LONGEST_LINE = 1 << 20  # maximum number of bytes in a row; longer rows are skipped
_MOST_CURVES = 200
_MOST_EVENTS = 500
_MOST_SAMPLES = 200  # maximum number of evaluations with generated text
_LOG_LINES, _LOG_BYTES = 200, 1 << 16  # limits on the part read from the end of log.txt


@dataclass
class ReadRun:
    """The contents of a run's folder."""

    folder: Path
    name: str = ""
    # name -> values by step, in order; timers, in ms, are named timers/<phase>
    curves: dict[str, dict[int, float]] = field(default_factory=dict)
    events: list[tuple[int, str]] = field(default_factory=list)  # (step, sentence)
    generated: list[tuple[int, list[tuple[str, str]]]] = field(default_factory=list)  # (step, [(prompt, text)])
    config: dict[str, str] = field(default_factory=dict)  # such as {"run.seed": "1234"}
    config_text: str = ""
    log_end: str = ""
    last_step: int = 0
    problems: list[str] = field(default_factory=list)  # sentences


def read_runs(folders: list[str]) -> list[ReadRun]:
    """Read runs, give them distinct names, and prefix each run's problems with the name.

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
    """Name each folder by the end of its path, with the smallest number of parts that makes all names distinct."""
    parts = [folder.resolve().parts for folder in folders]
    for length in range(1, max(map(len, parts)) + 1):
        names = ["/".join(p[-length:]) for p in parts]
        if len(set(names)) == len(names):
            return names
    return [f"{p[-1]} ({number})" for number, p in enumerate(parts, 1)]  # the same folder was given twice


def _read(folder: Path) -> ReadRun:
    paths = RunFolder(folder)
    if not paths.metrics.exists():
        raise UserError(f"{folder}: no metrics.jsonl found; give the folder of a run that has logged a step")
    run = ReadRun(folder)
    with (
        os_errors_as(UserError, f"{paths.metrics}: cannot be read"),
        open_regular(paths.metrics, follow=False) as file,
    ):
        _read_rows(run, BytesIO(file.read(_MOST_BYTES)))
        if file.read(1):
            run.problems.append(f"only the first {_MOST_BYTES} bytes of metrics.jsonl are shown")
    run.curves = {key: dict(sorted(curve.items())) for key, curve in run.curves.items()}
    run.events = sorted(run.events[:_MOST_EVENTS])
    _read_config(run, paths)
    try:
        run.log_end = "\n".join(read_end(paths.log, _LOG_BYTES)[-_LOG_LINES:])
    except OSError as error:
        run.problems.append(f"log.txt could not be read ({error.strerror})")
    return run


# ---- metrics.jsonl


def _read_rows(run: ReadRun, lines: Iterable[bytes]) -> None:
    damaged, twice, kinds = list[int](), False, set[str]()
    number = 0
    for number, line in enumerate(lines, 1):
        row = read_row(line) if len(line) <= _LONGEST_LINE else None
        if row is None:
            damaged.append(number)
            continue
        numbers = _numbers(row)
        step, kinds = row["step"], kinds | numbers.keys()
        twice |= step <= run.last_step and bool(run.curves)
        run.last_step = max(run.last_step, step)
        for key in numbers:
            if key in run.curves or len(run.curves) < _MOST_CURVES:
                run.curves.setdefault(key, {})[step] = numbers[key]
        if isinstance(generated := row.get("generated"), list) and len(run.generated) < _MOST_SAMPLES:
            pairs = [(str(s.get("prompt")), str(s.get("text"))) for s in generated if isinstance(s, dict)]
            run.generated += [(step, pairs)] if pairs else []
        if "loss" in row and "loss" not in numbers:
            run.events.append((step, "the loss was not finite"))
        if isinstance(notes := row.get("notes"), list):
            run.events += [(step, str(note)) for note in notes]
    if len(kinds) > _MOST_CURVES:
        run.problems.append(f"metrics.jsonl has more than {_MOST_CURVES} metrics; only the first ones are shown")
    if twice:
        run.problems.append("metrics.jsonl contains some steps twice or out of order; the later row is used")
    if damaged:
        where = "the last line" if damaged == [number] else f"{len(damaged)} lines, the first being line {damaged[0]},"
        run.problems.append(
            f"metrics.jsonl: {where} could not be read (the run was killed or is still writing); the rest is shown"
        )


def _numbers(row: dict[str, Any]) -> dict[str, float]:
    """Return the finite numbers of a row."""
    values = {key: value for key, value in row.items() if key != "step"}
    if isinstance(timers := row.get("timers"), dict):
        values |= {f"timers/{phase}": value for phase, value in timers.items()}
    return {key: float(value) for key, value in values.items() if is_number(value)}


# ---- config.yaml


def _read_config(run: ReadRun, paths: RunFolder) -> None:
    try:
        run.config_text = paths.read_config()
        tree, _ = parse(run.config_text)
        if not isinstance(tree, dict):
            raise Unreadable("it is not a mapping")
        run.config = {key: v if isinstance(v, str) else json.dumps(v) for key, v in leaves(tree)}
    except (OSError, Unreadable) as error:
        run.problems.append(f"config.yaml could not be read ({first_line(error)})")
