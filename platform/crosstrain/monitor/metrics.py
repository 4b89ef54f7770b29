"""metrics.jsonl: a run's numbers, one JSON object a line; and how rows name what is in them to trackers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from crosstrain.utils.files import write_atomically
from crosstrain.utils.units import finite

Row = dict[str, Any]  # step, plain numbers, {"timers": {phase: ms}}, and texts: see `texts`


@dataclass
class StepMetrics:
    """Numbers of one attempted step; None: not finite, or not measured."""

    step: int
    loss: float | None  # mean over target tokens
    lr: float
    grad_norm: float | None  # before clipping
    loss_scale: float
    samples: int  # sample numbers that the run has gone through
    skipped_steps: int
    sequence_length: int | None = None  # of a curriculum

    # Measured by the reporter, over the steps since the last logged one.
    step_ms: float = 0.0
    tokens_per_second: float = 0.0
    timers: dict[str, float] = field(default_factory=dict)  # phase -> ms, of this step
    memory: dict[str, float] = field(default_factory=dict)  # memory_allocated_mb and the like
    mfu: float | None = None  # model FLOPs utilisation
    gpu_utilisation: float | None = None  # percent
    loader_samples_per_second: float | None = None
    notes: list[str] = field(default_factory=list)  # of stragglers and slow data

    def row(self) -> Row:
        """The numbers as trackers get them, without those that were not measured."""
        out: Row = {}
        for name, value in vars(self).items():
            if name == "memory":
                out |= value
            elif value not in (None, []) or name in ("loss", "grad_norm"):
                out[name] = value
        return out


def line(row: Row) -> str:
    """A row as the file holds it."""
    return json.dumps({key: finite(value) for key, value in row.items()}) + "\n"


def cut_back(path: Path, step: int) -> None:
    """Drop the rows after `step` from a file, and what a kill left unfinished; nothing if there is no file."""
    if not path.exists():
        return
    kept, lines = [], path.read_text(encoding="utf-8").splitlines(keepends=True)
    for text in lines:
        try:
            if text.endswith("\n") and json.loads(text)["step"] <= step:
                kept.append(text)
        except ValueError:
            continue
    if kept != lines:
        write_atomically(path, "".join(kept))


def scalars(row: Row) -> Iterator[tuple[str, float]]:
    """The numbers of a row under the tags that every tracker gives them: train/loss, val/loss, timers_ms/forward."""
    for key, value in row.items():
        if key == "timers":
            for phase, milliseconds in value.items():
                yield f"timers_ms/{phase}", milliseconds
        elif key != "step" and isinstance(value, int | float):
            group, name = key.split("_", 1) if key.startswith("val_") else ("train", key)
            yield f"{group}/{name}", value


def texts(row: Row) -> Iterator[tuple[str, str]]:
    """The texts of a row under their tags: generated/0 and so on, a prompt with its continuation; notes."""
    for number, sample in enumerate(row.get("generated", [])):
        yield f"generated/{number}", sample["prompt"] + sample["text"]
    if row.get("notes"):
        yield "notes", "\n".join(row["notes"])


def flat(config: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, bool | int | float | str]]:
    """Keys of a configuration as run.optimizer.name; values that are neither numbers nor texts as text."""
    for key, value in config.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value if isinstance(value, bool | int | float | str) else str(value)
