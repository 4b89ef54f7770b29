"""The folder of a run: config.yaml, log.txt, metrics.jsonl, bad_steps.jsonl, profile/, checkpoints/, and what
trackers keep there.
"""

from __future__ import annotations

import os
import socket
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from filelock import FileLock, Timeout

from crosstrain.errors import UserError

if TYPE_CHECKING:  # reading a run's folder needs no torch
    from crosstrain.distributed import Group

_PATIENCE = 20  # seconds that a run which was just killed may take to be gone, or a file to be seen elsewhere


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

    def check_shared(self, world: Group) -> None:
        """UserError, on every rank, unless each sees the folder that rank 0 has made. Collective."""
        if world.size == 1:
            return
        proof = self.path / ".shared"
        token = uuid.uuid4().hex if world.rank == 0 else ""
        if world.rank == 0:
            try:
                proof.write_text(token)
            except OSError as error:
                raise UserError(f"run.output_dir: {self.path} cannot be written to ({error.strerror})") from None
        token = world.all_gather(token)[0]
        blind = world.all_gather(None if self._holds(proof, token) else socket.gethostname())
        if world.rank == 0:
            proof.unlink(missing_ok=True)
        if hosts := sorted({host for host in blind if host}):
            raise UserError(
                f"run.output_dir: {self.path.absolute()} on {', '.join(hosts[:4])} is not the folder that rank 0 "
                f"writes to; put it on a file system that all nodes share"
            )

    @staticmethod
    def _holds(proof: Path, token: str) -> bool:
        """Whether a file says `token`, which other machines may see some seconds after it was written."""
        deadline = time.monotonic() + _PATIENCE
        while True:
            try:
                os.listdir(proof.parent)  # has a network's file system look again
                if proof.read_text() == token:
                    return True
            except OSError:
                pass
            if time.monotonic() > deadline:
                return False
            time.sleep(0.2)

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
