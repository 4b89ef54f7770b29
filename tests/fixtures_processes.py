"""The program as forks of a server that has imported everything: they start in a moment, to be watched and killed."""

from __future__ import annotations

import atexit
import os
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
import weakref
from collections.abc import Callable, Iterable
from multiprocessing.process import BaseProcess
from pathlib import Path

from conftest import ENVIRONMENT, ROOT, Run, Workspace, kill_session, logged_step
from fixtures_ranks import forked, free_port, rank_environment


class Program:
    """The program at the head of a session. It is used like a `subprocess.Popen`; workers that it starts are no forks.

    Its words are in a file: the errors among them if `merged`, else in another.
    """

    def __init__(self, folder: Path, arguments: Iterable[str], merged: bool = False) -> None:
        texts = Path(tempfile.mkdtemp())
        weakref.finalize(self, shutil.rmtree, texts)
        self._out, self._err = (texts / name for name in ("out", "out" if merged else "err"))
        self._process = _start({}, folder, arguments, self._out, self._err)
        self.pid: int = self._process.pid  # type: ignore[assignment]

    @property
    def said(self) -> str:
        return self._out.read_text() if self._out.exists() else ""

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self.returncode is None:
            _end(self._process)
            raise subprocess.TimeoutExpired("the program", timeout or 0.0, self.said)
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        self.wait(timeout)
        return self.said, "" if self._err == self._out else self._err.read_text()

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)


def program(folder: Path, *arguments: str, seconds: float = 240) -> Run:
    """The program in `folder`, and what it says."""
    process = Program(folder, arguments)
    out, err = process.communicate(seconds)
    return Run(folder, out, err, process.wait())


def start_as_user(
    workspace: Workspace, name: str, *options: str, nproc: int = 1, flags: tuple[str, ...] = (), merged: bool = True
) -> Program:
    """Start training as `Workspace.start` does, without the seconds of imports."""
    _, _, *arguments = workspace.command(f"run.output_dir={name}", *options, nproc=nproc, flags=flags)
    return Program(workspace.path, ["train", *arguments], merged)


def train_as_user(
    workspace: Workspace, name: str, *options: str, nproc: int = 1, flags: tuple[str, ...] = (), fails: bool = False
) -> Run:
    """Train as `Workspace.train` does, without the seconds of imports."""
    process = start_as_user(workspace, name, *options, nproc=nproc, flags=flags, merged=False)
    out, err = process.communicate(240)
    assert fails or process.returncode == 0, f"{out}\n{err}"
    return Run(workspace.path / name, out, err, process.wait())


def _start(environment: dict[str, str], folder: Path, arguments: Iterable[str], out: Path, err: Path) -> BaseProcess:
    process = forked(_run, (ENVIRONMENT | environment, folder, [*arguments], out, err))
    process.start()
    atexit.register(_end, process)  # of a test that failed; multiprocessing would wait for it
    return process


def _end(process: BaseProcess) -> None:
    if process.is_alive():
        kill_session(process)


def _run(environment: dict[str, str], folder: Path, arguments: list[str], out: Path, err: Path) -> None:
    import torch

    from crosstrain.cli.main import main

    os.setsid()
    os.environ |= environment
    os.chdir(folder)
    for path, number in ((out, 1), (err, 2)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT), number)
    torch.set_num_threads(1)
    sys.argv = [str(ROOT / f"{arguments[0]}.py"), *arguments[1:]]
    try:
        code = main(arguments)
    except BaseException:
        traceback.print_exc()
        code = 99
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


class Training:
    """The program on `size` ranks that another launcher, such as torchrun, would start."""

    def __init__(
        self, workspace: Workspace, name: str, *options: str, size: int = 1, flags: tuple[str, ...] = ()
    ) -> None:
        self.folder, self.out = workspace.path / name, workspace.path / f"{time.monotonic_ns()}.out"
        chosen = (f"run.output_dir={self.folder}", *options)
        arguments = ["train", "--cfg-path", str(workspace.project), "--no-fit-check", *flags, "--options", *chosen]
        port = free_port()
        self.ranks = [
            _start(rank_environment(rank, size, port), Path(), arguments, self.out, self.out) for rank in range(size)
        ]

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
