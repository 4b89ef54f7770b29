"""Several machines: network namespaces joined by a cable are as good, for all that the program can tell."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator

import pytest

from conftest import ENVIRONMENT, Run, Workspace, kill
from fixtures_kill import INTERVALS

STEPS = 40
OPTIONS = (*INTERVALS, f"run.max_iters={STEPS}", "run.save_in_background=false", "run.max_restarts=3")
ADDRESSES = ("10.77.0.1", "10.77.0.2")
PORT = 29411


class Machines:
    """Two of them, each a network namespace with a loopback of its own, and a cable between."""

    def __init__(self, workspace: Workspace) -> None:
        self.workspace = workspace
        self.names = [f"ct{os.getpid()}n{i}" for i in range(2)]
        self.started: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Machines:
        first, second = self.names
        for name in self.names:
            _ip("netns", "add", name)
        _ip("link", "add", "cable0", "netns", first, "type", "veth", "peer", "name", "cable1", "netns", second)
        for i, (name, address) in enumerate(zip(self.names, ADDRESSES, strict=True)):
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", f"cable{i}")
            _ip("-n", name, "link", "set", f"cable{i}", "up")
            _ip("-n", name, "link", "set", "lo", "up")
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.started:
            if process.poll() is None:
                kill(process)
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], check=False)

    def start(
        self,
        node: int,
        name: str,
        *options: str,
        nnodes: str = "2",
        before: str = "",
        fresh: bool = False,
        nproc: int = 1,
    ) -> subprocess.Popen[str]:
        """The same command on either node, in a session of its own; `before`: what its shell runs first."""
        flags = ("--nnodes", nnodes, "--node-rank", str(node), "--rdzv-endpoint", f"{ADDRESSES[0]}:{PORT}")
        command = self.workspace.command(
            f"run.output_dir={name}", *OPTIONS, *options, nproc=nproc, flags=(*flags, "--fresh") if fresh else flags
        )
        shell = ["sh", "-c", f'{before or ":"} && exec "$@"', "sh", *command]
        process = subprocess.Popen(
            ["ip", "netns", "exec", self.names[node], *shell],
            cwd=self.workspace.path,
            env=ENVIRONMENT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.started.append(process)
        return process

    def plug(self, into: bool) -> None:
        """Plug or unplug the cable."""
        _ip("-n", self.names[1], "link", "set", "cable1", "up" if into else "down")

    def train(self, name: str, *options: str) -> Run:
        nodes = [self.start(node, name, *options) for node in range(2)]
        out = "".join(finish(node) for node in nodes)
        return Run(self.workspace.path / name, out)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


def finish(process: subprocess.Popen[str], code: int = 0, seconds: float = 200) -> str:
    out = process.communicate(timeout=seconds)[0]
    assert process.returncode == code, out
    return out


@pytest.fixture(scope="module")
def machines(shared_workspace: Workspace) -> Iterator[Machines]:
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("needs root and the command `ip` to make network namespaces")
    with Machines(shared_workspace) as made:
        yield made
