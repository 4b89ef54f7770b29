"""The folder of a run: config.yaml, log.txt, metrics.jsonl, bad_steps.jsonl, profile/, checkpoints/, and what
trackers keep there.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import yaml
from filelock import FileLock, Timeout

from crosstrain.errors import UserError

_PATIENCE = 20  # seconds that a run which was just killed may take to be gone


class RunFolder:
    """Paths of a run's files."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).expanduser()
        self.config = self.path / "config.yaml"
        self.log = self.path / "log.txt"
        self.metrics = self.path / "metrics.jsonl"
        self.bad_steps = self.path / "bad_steps.jsonl"
        self.profile = self.path / "profile"
        self.checkpoints = self.path / "checkpoints"
        self._lock = FileLock(self.path / ".lock")  # given back when the process ends, however it ends

    def create(self) -> None:
        """Make the folder and hold it for this process; UserError where that is not possible."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self.log.touch()
            self._lock.acquire(timeout=_PATIENCE)
        except Timeout:
            raise UserError(
                f"run.output_dir: another process is training in {self.path}; choose another folder"
            ) from None
        except OSError as error:
            raise UserError(f"run.output_dir: {self.path} cannot be written to ({error.strerror})") from None

    def set_aside(self) -> Path | None:
        """Rename an earlier run's folder to the first free NAME.1, NAME.2, ...; nothing is ever deleted."""
        if not self.path.exists():
            return None
        number = 1
        while (aside := self.path.with_name(f"{self.path.name}.{number}")).exists():
            number += 1
        try:
            os.rename(self.path, aside)
        except OSError as error:
            raise UserError(f"--fresh: {self.path} cannot be renamed to {aside} ({error.strerror})") from None
        return aside

    def write_config(self, plain: dict[str, Any]) -> None:
        self.config.write_text(yaml.safe_dump(plain, sort_keys=False), encoding="utf-8")
