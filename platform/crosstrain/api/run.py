"""A run's folder and its contents."""

import json
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from crosstrain.api import model
from crosstrain.api.model import OpenModel
from crosstrain.checkpoint.folders import read_pointer, step_folder
from crosstrain.checkpoint.run_folder import RunFolder
from crosstrain.config.sources import Overrides
from crosstrain.monitor.metrics import Row
from crosstrain.utils.errors import UserError


@dataclass(frozen=True)
class Run:
    """A run, given by its folder. Raises UserError if files are missing."""

    folder: Path

    @property
    def metrics(self) -> list[Row]:
        """The logged metrics, one row per step. `pandas.DataFrame(run.metrics)` makes a table."""
        path, rows = RunFolder(self.folder).metrics, dict[int, Row]()
        if not path.exists():
            raise UserError(f"{self.folder}: no metrics.jsonl; expected the folder of a run that has logged a step")
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            with suppress(ValueError, KeyError):  # the last line may be half written
                row = json.loads(line)
                rows.setdefault(row["step"], {}).update(row)  # steps repeated after a resume are logged twice
        return [rows[step] for step in sorted(rows)]

    @property
    def latest_checkpoint(self) -> Path | None:
        """The folder of the newest checkpoint, or None if there is no checkpoint."""
        return self._checkpoint("latest")

    @property
    def best_checkpoint(self) -> Path | None:
        """The folder of the checkpoint with the lowest validation loss, or None without `run.save_best`."""
        return self._checkpoint("best")

    def _checkpoint(self, pointer: str) -> Path | None:
        root = RunFolder(self.folder).checkpoints
        step = read_pointer(root, pointer)
        return None if step is None else step_folder(root, step)

    def open(self, options: Overrides = (), **more: Any) -> OpenModel:
        """Open the newest undamaged checkpoint. The arguments are those of `crosstrain.open`, without `checkpoint`."""
        return model.open(self.folder, options, **more)
