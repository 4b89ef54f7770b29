"""The program on ranks that start in a moment, to be watched and killed."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from conftest import Workspace, logged_step
from fixtures_ranks import start


class Training:
    """The program in a process of its own, started in a moment."""

    def __init__(
        self, workspace: Workspace, name: str, *options: str, size: int = 1, flags: tuple[str, ...] = ()
    ) -> None:
        self.folder, self.out = workspace.path / name, workspace.path / f"{time.monotonic_ns()}.out"
        chosen = (f"run.output_dir={self.folder}", *options)
        arguments = ["train", "--cfg-path", str(workspace.project), "--no-fit-check", *flags, "--options", *chosen]
        self.ranks = start(size, arguments, self.out)

    def until(self, condition: Callable[[], bool], seconds: float = 60) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert all(rank.is_alive() for rank in self.ranks), self.said
            assert time.monotonic() < deadline, self.said
            time.sleep(0.002)

    def until_step(self, step: int, folder: Path | None = None) -> None:
        self.until(lambda: logged_step(folder or self.folder) >= step)

    def end(self, seconds: float = 240) -> int:
        """Exit code of the first rank."""
        for rank in self.ranks:
            rank.join(seconds)
            assert rank.exitcode is not None, self.said
        return self.ranks[0].exitcode

    @property
    def said(self) -> str:
        return self.out.read_text() if self.out.exists() else ""
