"""metrics.jsonl: metrics for other programs, for resumed runs and for `crosstrain report`."""

import json
from pathlib import Path
from typing import Any

from crosstrain import Row, TrackedRun, Tracker, finite, registry, write_atomically
from crosstrain.checkpoint.run_folder import RunFolder
from crosstrain.utils.files import append


@registry.register_tracker("jsonl")
class JsonlTracker(Tracker):
    """metrics.jsonl: one JSON object per logged step, written when the step is done; each step appears only once."""

    def __init__(self, options: Any, run: TrackedRun) -> None:
        super().__init__(options, run)
        self._path = RunFolder(run.folder).metrics
        if self._path.exists():
            _cut_back(self._path, run.resumed_step)

    def log(self, row: Row) -> None:
        append(self._path, json.dumps(finite(row)) + "\n")

    def place(self) -> str:
        return str(self._path)


def _cut_back(path: Path, step: int) -> None:
    """Drop the rows after `step`, and an incomplete line that a killed run left."""
    kept, lines = [], path.read_text(encoding="utf-8").splitlines(keepends=True)
    for text in lines:
        try:
            if text.endswith("\n") and json.loads(text)["step"] <= step:
                kept.append(text)
        except ValueError:
            continue
    if kept != lines:
        write_atomically(path, "".join(kept))
