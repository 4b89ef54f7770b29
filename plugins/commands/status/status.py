"""Read a run's state (running, finished, stopped or died) from the files in its folder."""

import json
import re
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from crosstrain import is_number, read_end, read_regular
from crosstrain.checkpoint.run_folder import RunFolder
from crosstrain.config.yaml_text import Unreadable, parse
from crosstrain.utils.files import last_checkpoint

_END = 1 << 16  # bytes read from the end of log.txt and of metrics.jsonl
_STAMPED = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d (.*)")
# Prefixes of log lines that `last_line` skips: step metrics, and the list of commands at the end.
_ADDS_NOTHING = re.compile(r"(step +\d+/\d+ |iteration +\d|time \(ms\) |memory \(MB\) |open next:)")
# Prefix of a log line -> state of a run that is not running; the last line with one of these prefixes decides. "global
# batch" is logged when training starts, so a run without a later line of this kind died.
_STATES = {"open next:": "finished", "stopped at ": "stopped", "global batch ": "died"}


def find_runs(places: Iterable[str | Path]) -> Iterator[Path]:
    """Yield the run folders in and below `places`, sorted by name; links to folders are not followed."""
    for place in places:
        for log in sorted(Path(place).expanduser().rglob("log.txt")):
            if (log.parent / "config.yaml").exists():
                yield log.parent


def status(folder: Path) -> dict[str, Any]:
    """Read a run's state; unreadable values are None. Raises OSError if the log cannot be read."""
    run = RunFolder(folder)
    row, checkpoint, weights = dict[str, Any](), None, None
    stamped = [found[1] for line in read_end(run.log, _END) if (found := _STAMPED.match(line))]
    last = next((line for line in reversed(stamped) if not _ADDS_NOTHING.match(line)), "")
    told = (state for line in reversed(stamped) for begins, state in _STATES.items() if line.startswith(begins))
    with suppress(OSError):
        row = next(filter(None, map(read_row, reversed(read_end(run.metrics, _END)))), {})
    if (latest := last_checkpoint(folder)) != folder and latest.is_dir():
        checkpoint = int(latest.name.removeprefix("step_"))
        with suppress(OSError, ValueError, RecursionError, LookupError, TypeError):
            found = json.loads(read_regular(latest / "state.json", 1 << 24))["bitwise"]["weights"]
            weights = found if isinstance(found, str) else None
    return {
        "run": str(folder),
        "state": "running" if run.is_held() else next(told, "died"),  # or finished, or stopped by a signal
        "step": row.get("step"),  # last logged step
        "max_iters": _max_iters(run),
        "loss": loss if is_number(loss := row.get("loss")) else None,  # of the last logged step
        "checkpoint": checkpoint,  # step in the name of the last checkpoint's folder; files are not checked
        "weights": weights,  # SHA-256 digest of the last checkpoint's weights, if `run.bitwise` is set
        "silent_seconds": round(time.time() - run.log.stat().st_mtime, 1),  # since the last line of the log
        "last_line": last,  # last line of the log other than step metrics
    }


def read_row(line: str | bytes) -> dict[str, Any] | None:
    """Parse a row of metrics.jsonl; return None for any other line, such as an incomplete row."""
    with suppress(ValueError, RecursionError):
        row = json.loads(line)
        if isinstance(row, dict) and type(step := row.get("step")) is int and 0 <= step < 1 << 53:
            return row
    return None


def _max_iters(run: RunFolder) -> int | None:
    with suppress(OSError, Unreadable, AttributeError):
        tree, _ = parse(run.read_config())
        return most if type(most := tree["run"].get("max_iters")) is int else None
    return None
