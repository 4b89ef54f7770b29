"""A run's folder and its contents."""

import json
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from crosstrain.api import model
from crosstrain.api.model import OpenModel
from crosstrain.checkpoint.folders import read_pointer, step_folder
from crosstrain.checkpoint.run_folder import RunFolder
from crosstrain.config.sources import Overrides
from crosstrain.monitor.metrics import Row
from crosstrain.utils.drawing import picture
from crosstrain.utils.errors import UserError

_SECONDS = 2.0  # seconds between updates of the live plot


@dataclass(frozen=True)
class Run:
    """A run, given by its folder. Notebooks show a plot of its losses. Raises UserError if files are missing."""

    folder: Path

    @property
    def metrics(self) -> list[Row]:
        """The logged metrics, one row per step. `pandas.DataFrame(run.metrics)` makes a table."""
        path, rows = RunFolder(self.folder).metrics, dict[int, Row]()
        if not path.exists():
            raise UserError(f"{self.folder}: there is no metrics.jsonl; name a run's folder in which a step was logged")
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            with suppress(ValueError, KeyError):  # the last line may be half written
                row = json.loads(line)
                rows.setdefault(row["step"], {}).update(row)  # steps repeated after a resume are logged twice
        return [rows[step] for step in sorted(rows)]

    @property
    def latest_checkpoint(self) -> Path | None:
        """The newest checkpoint's folder."""
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
        """Open the newest undamaged checkpoint. The arguments are those of `crosstrain.open`."""
        return model.open(self.folder, options, **more)

    def _repr_svg_(self) -> str | None:
        """Return a plot of the losses over the steps, for IPython, or None without losses or matplotlib."""
        try:
            rows = self.metrics
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "losses.svg"
                with picture(path, 6, 2.5) as figure:
                    axis = figure.subplots()
                    for key in ("loss", "val_loss"):
                        points = [(row["step"], row[key]) for row in rows if row.get(key) is not None]
                        if points:
                            axis.plot(*zip(*points, strict=True), label=key)
                    axis.set_xlabel("step")
                    axis.legend(frameon=False)
                return path.read_text(encoding="utf-8")
        except UserError:
            return None


@contextmanager
def live(run: Run) -> Iterator[None]:
    """Plot the run's losses in the notebook cell during the block. Does nothing outside notebooks."""
    ipython = sys.modules.get("IPython")
    if getattr(ipython and ipython.get_ipython(), "kernel", None) is None:
        yield
        return
    shown = import_module("IPython.display").display({"text/plain": ""}, raw=True, display_id=True)
    over = threading.Event()

    def follow() -> None:
        while not over.wait(_SECONDS):
            shown.update(run)

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        shown.update(run)
