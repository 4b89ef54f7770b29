"""Where a run's numbers go: metrics.jsonl for programs, TensorBoard for eyes."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import yaml

Row = dict[str, Any]  # step, plain numbers, and {"timers": {phase: ms}}


def finite(value: Any) -> Any:
    """`value`, or None for a number that JSON has no form for."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


class JsonlTracker:
    """One JSON object per logged step, flushed line by line; no step stands twice, also after a resume."""

    def __init__(self, path: Path, resumed_step: int) -> None:
        _cut_back(path, resumed_step)
        self._file = path.open("a", encoding="utf-8", buffering=1)

    def log(self, row: Row) -> None:
        self._file.write(json.dumps({key: finite(value) for key, value in row.items()}) + "\n")

    def close(self) -> None:
        self._file.close()


def _cut_back(path: Path, step: int) -> None:
    """Drop rows after `step`, and a last line that a kill left unfinished."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        try:
            if line.endswith("\n") and json.loads(line)["step"] <= step:
                kept.append(line)
        except ValueError:
            continue
    temporary = path.with_suffix(".tmp")
    temporary.write_text("".join(kept), encoding="utf-8")
    os.replace(temporary, path)


class TensorBoardTracker:
    """Scalars, hyper-parameters and the resolved configuration as a TensorBoard event file."""

    def __init__(self, folder: Path, resumed_step: int, config: dict[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=resumed_step + 1)
        if not resumed_step:
            text = yaml.safe_dump(config, sort_keys=False)
            self._writer.add_text("config", "    " + text.replace("\n", "\n    "))
        # add_hparams would open a second run folder; the plugin's own summaries put them into this one.
        from torch.utils.tensorboard.summary import hparams

        for summary in hparams(dict(_flat(config)), {"train/loss": None, "val/loss": None}):
            self._writer._get_file_writer().add_summary(summary)

    def log(self, row: Row) -> None:
        step = row["step"]
        for key, value in row.items():
            if key == "timers":
                for phase, milliseconds in value.items():
                    self._writer.add_scalar(f"timers_ms/{phase}", milliseconds, step)
            elif key != "step" and isinstance(value, int | float):
                group, name = key.split("_", 1) if key.startswith("val_") else ("train", key)
                self._writer.add_scalar(f"{group}/{name}", value, step)

    def close(self) -> None:
        self._writer.close()


def _flat(config: dict[str, Any], prefix: str = "") -> Any:
    for key, value in config.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value if isinstance(value, bool | int | float | str) else str(value)
