"""The folder of a run: config.yaml, log.txt, metrics.jsonl, tensorboard/, checkpoints/."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import yaml

from crosstrain.errors import UserError


class RunFolder:
    """Paths of a run's files."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).expanduser()
        self.config = self.path / "config.yaml"
        self.log = self.path / "log.txt"
        self.metrics = self.path / "metrics.jsonl"
        self.tensorboard = self.path / "tensorboard"
        self.checkpoints = self.path / "checkpoints"

    def create(self) -> None:
        """Make the folder; UserError where that is not possible."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"run.output_dir: {self.path} cannot be made a folder ({error.strerror})") from None

    def set_aside(self) -> Path | None:
        """Rename an earlier run's folder to the first free NAME.1, NAME.2, ...; nothing is ever deleted."""
        if not self.path.exists():
            return None
        number = 1
        while (aside := self.path.with_name(f"{self.path.name}.{number}")).exists():
            number += 1
        os.rename(self.path, aside)
        return aside

    def write_config(self, plain: dict[str, Any]) -> None:
        self.config.write_text(yaml.safe_dump(plain, sort_keys=False), encoding="utf-8")
