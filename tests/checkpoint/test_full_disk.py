"""A disk that is full, from the start or at any moment: a sentence or a warning, and nothing that was saved is lost."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from conftest import Run, Workspace
from crosstrain.checkpoint import folders
from fixtures_processes import Training

OPTIONS = ("run.max_iters=12", "run.save_interval=4", "run.profile={steps: [2, 2]}")
KIB = 1024


@pytest.fixture
def disk(workspace: Workspace) -> Iterator[Path]:
    """A file system of its own, of 64 MiB."""
    folder = workspace.path / "disk"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(folder)], check=True)
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def leave(disk: Path, free: int) -> None:
    """Fill the disk but for so many bytes."""
    with open(disk / "ballast", "wb") as file:
        size = os.statvfs(disk)
        os.posix_fallocate(file.fileno(), 0, max(size.f_bavail * size.f_frsize - free, 1))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("step", [0, 6])
def test_a_disk_that_fills_up(workspace: Workspace, disk: Path, step: int) -> None:
    """From nothing to room for everything in forty steps."""
    codes = set()
    for number in range(40):
        free, name = number * 96 * KIB, f"disk/run{number}"
        options = OPTIONS
        if not step:
            leave(disk, free)
        else:
            first = Training(workspace, name, *OPTIONS, "run.max_iters=6", "run.lr_decay_iters=12")
            assert first.end() == 0, first.said
            leave(disk, free)
        full = Training(workspace, name, *options, "run.lr_decay_iters=12")
        code = full.end()
        codes.add(code)
        assert code in (0, 1), full.said
        for word in ("Traceback", "Logging error", "Exception"):
            assert word not in full.said, f"{free} bytes: {full.said}"
        if code == 1:
            assert full.said.strip().splitlines()[-1].startswith("error: "), full.said
        config = full.folder / "config.yaml"
        assert not config.exists() or yaml.safe_load(config.read_text())["run"]["max_iters"] in (6, 12)
        newest, damaged = folders.newest_valid(full.folder / "checkpoints")
        assert damaged == []
        assert newest is not None or not step
        (disk / "ballast").unlink()
        healed = Training(workspace, name, *options, "run.lr_decay_iters=12")
        assert healed.end() == 0, healed.said
        steps = Run(healed.folder).column("step")
        assert len(steps) == len(set(steps))
        assert folders.newest_valid(full.folder / "checkpoints")[0] == Run(full.folder).checkpoint(12)
        subprocess.run(["rm", "-rf", str(full.folder)], check=True)
    assert codes == {0, 1}
