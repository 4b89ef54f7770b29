"""Workers that die are replaced, and nothing differs from the run in which none did."""

from __future__ import annotations

import os
import pty
import select
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from conftest import ENVIRONMENT, Run, Workspace, kill, logged_step, wait_until
from fixtures_kill import INTERVALS, assert_same_weights, dying, numbers, workers
from fixtures_processes import train_as_user
from fixtures_ranks import free_port, mostly_slow, train

SENTENCE = "; all ranks restarted (restart {number} of {most}) and continue from step {step}"


@pytest.fixture(scope="module")
def undisturbed(shared_workspace: Workspace) -> Callable[[int], Run]:
    """The run of as many workers."""
    return cache(lambda nproc: train(shared_workspace.project, f"undisturbed{nproc}", *INTERVALS, size=nproc))


def assert_undisturbed(run: Run, undisturbed: Run) -> None:
    assert numbers(run) == numbers(undisturbed)
    assert_same_weights(run.checkpoint(20), undisturbed.checkpoint(20))


@pytest.mark.parametrize("nproc", mostly_slow([1, 2], []))
@pytest.mark.parametrize("how", mostly_slow(["kill", "raise"], []))
def test_a_dead_worker_is_replaced(
    shared_workspace: Workspace, undisturbed: Callable[[int], Run], tmp_path: Path, nproc: int, how: str
) -> None:
    rank = nproc - 1
    # The first start ends at its fourth step, before anything is saved; the second at its tenth.
    deaths = dying(tmp_path, f"4:{rank}:{how}", f"10:{rank}:{how}")
    options = (*INTERVALS, "run.max_restarts=2", "run.save_in_background=false", *deaths)
    run = train_as_user(shared_workspace, f"{how}{nproc}", *options, nproc=nproc)
    assert_undisturbed(run, undisturbed(nproc))
    what = "was killed by SIGKILL" if how == "kill" else "failed with ZeroDivisionError: a bug in a plugin"
    told = [line for line in (run.folder / "log.txt").read_text().splitlines() if "ranks restarted" in line]
    assert [line.split(" ", 2)[2] for line in told] == [
        f"rank {rank} {what}" + SENTENCE.format(number=1, most=2, step=0),
        f"rank {rank} {what}" + SENTENCE.format(number=2, most=2, step=8),
    ]
    assert run.err.count("Traceback") == (2 if how == "raise" else 0), "each is shown where it happens"


@pytest.mark.slow
def test_restarts_end(workspace: Workspace) -> None:
    options = (
        "run.max_restarts=2", "run.save_interval=2", "run.save_in_background=false",
        *dying(workspace.path, "3:1:always-kill"),
    )  # fmt: skip
    run = workspace.train("out", *options, nproc=2, fails=True)
    assert run.code == 1
    assert "rank 1 was killed by SIGKILL" in run.err
    assert run.out.count("ranks restarted") == 2
    assert "note: run.max_restarts: all 2 restarts are used up, so the run ends\nerror: rank 1 " in run.err
    assert (run.folder / "checkpoints" / "latest").read_text().strip() == "step_000006", "each start got two steps on"


LATE = '''
import os, pathlib, signal
from dataclasses import dataclass
from crosstrain import Callback, registry

@registry.register_callback("late")
class Late(Callback):
    """The death of rank 1 in the last seconds of a run, once."""
    @dataclass
    class Options:
        when: str
        grave: str
    def die(self, *_):
        grave = pathlib.Path(self.options.grave)
        if self.trainer.runner.world.rank == 1 and not grave.exists():
            grave.touch()
            if self.options.when == "exit":
                os._exit(3)
            os.kill(os.getpid(), signal.SIGKILL)
    def on_save(self, folder):
        if self.options.when in ("save", "exit"):
            self.die()
    def on_end(self):
        if self.options.when == "end":
            self.die()
        if self.options.when == "close":
            self.trainer.runner.close = self.die
'''


@pytest.mark.slow
@pytest.mark.parametrize("when", ["save", "exit", "end", "close"])
def test_a_worker_that_dies_in_the_last_seconds_loses_nothing(
    shared_workspace: Workspace, undisturbed: Callable[[int], Run], tmp_path: Path, when: str
) -> None:
    (tmp_path / "late.py").write_text(LATE)
    late = f"run.callbacks=[{{name: late, when: {when}, grave: {tmp_path}/grave}}]"
    options = (*INTERVALS, "run.save_interval=null", f"run.plugins=[{tmp_path}/late.py]", late)
    name = f"late_{when}"
    run = shared_workspace.train(name, *options, nproc=2, fails=True)
    what = "ended with exit code 3 and without a Python error" if when == "exit" else "was killed by SIGKILL"
    assert (run.code, run.err.count("\n")) == (1, 1), run.err
    assert f"error: rank 1 {what}" in run.err
    saved = when in ("end", "close")
    assert run.checkpoint(20).exists() == saved
    again = shared_workspace.train(name, *options, nproc=2)
    assert "open next:" in again.out
    assert ("resuming" in again.out) == saved
    assert numbers(run) == numbers(undisturbed(2))
    assert_same_weights(run.checkpoint(20), undisturbed(2).checkpoint(20))


@pytest.mark.slow
@pytest.mark.parametrize("lost", [0, 1])
@pytest.mark.parametrize("what", ["launcher", "worker"])
def test_the_others_say_in_one_sentence_what_they_lost(workspace: Workspace, lost: int, what: str) -> None:
    port = free_port()
    nodes = []
    for node in range(2):
        flags = ("--nnodes", "2", "--node-rank", str(node), "--rdzv-endpoint", f"127.0.0.1:{port}")
        command = workspace.command("run.output_dir=out", "run.max_iters=1000000", nproc=1, flags=flags)
        nodes.append(
            subprocess.Popen(
                command,
                cwd=workspace.path,
                env=ENVIRONMENT,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
        )
    wait_until(lambda: logged_step(workspace.path / "out") >= 3, nodes[0])
    if what == "launcher":
        kill(nodes[lost])
    else:
        os.kill(workers(nodes[lost].pid)[0], signal.SIGKILL)
    errors = [node.communicate(timeout=100)[1] for node in nodes]
    host, elsewhere = socket.gethostname(), "error: another node ended the run; see its output for the reason"
    told = f"error: rank {lost} on {host} was killed by SIGKILL"
    expected = {
        ("launcher", 0): ("", f"error: lost the connection to node 0 (127.0.0.1:{port})"),
        ("launcher", 1): (f"error: node 1 ({host}) gave no sign of life for 3 s; ", ""),
        ("worker", 0): (told, elsewhere),
        ("worker", 1): (told, elsewhere),
    }
    for error, beginning in zip(errors, expected[what, lost], strict=True):
        lines = [line for line in error.splitlines() if not line.startswith("waiting for 2 nodes to join")]
        assert [line[: len(beginning)] for line in lines] == [beginning] * bool(beginning), error


@pytest.mark.slow
def test_a_users_mistake_is_not_tried_again(workspace: Workspace) -> None:
    run = workspace.train("out", "run.max_restarts=5", *dying(workspace.path, "2:0:user"), fails=True)
    assert run.code == 1
    assert run.err.strip() == "error: the moon is in the wrong phase; wait a week"
    assert "ranks restarted" not in run.out


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
@pytest.mark.parametrize("nproc", [1, 2])
def test_a_stop_is_no_failure(workspace: Workspace, nproc: int, number: signal.Signals) -> None:
    folder = workspace.path / "out"
    process = workspace.start("out", "run.max_iters=1000000", "run.max_restarts=3", nproc=nproc)
    wait_until(lambda: logged_step(folder) >= 3, process)
    process.send_signal(number)
    out = process.communicate(timeout=60)[0]
    assert process.returncode == 128 + number, out
    assert "ranks restarted" not in out
    assert (folder / "checkpoints" / "latest").read_text().strip() == f"step_{logged_step(folder):06d}"


@pytest.mark.slow
@pytest.mark.parametrize("ignored", [False, True])
@pytest.mark.parametrize("nproc", [1, 2])
def test_a_terminal_that_is_closed(workspace: Workspace, nproc: int, ignored: bool) -> None:
    """The run saves and leaves, although nobody reads it any more; under nohup it goes on."""
    folder = workspace.path / "out"
    command = workspace.command("run.output_dir=out", f"run.max_iters={60 if ignored else 10**6}", nproc=nproc)
    pid, terminal = pty.fork()
    if pid == 0:
        # Set the default too: tests that were themselves started by nohup ignore the signal.
        signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)
        os.chdir(workspace.path)
        os.execvpe(command[0], command, ENVIRONMENT)
    try:
        deadline = time.monotonic() + 120
        while logged_step(folder) < 3:
            assert time.monotonic() < deadline
            if select.select([terminal], [], [], 0.1)[0]:
                os.read(terminal, 1 << 16)
        os.close(terminal)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    except BaseException:
        os.kill(pid, signal.SIGKILL)  # or it trains for ever; its workers end with it
        raise
    assert code == (0 if ignored else 128 + signal.SIGHUP)
    assert (folder / "checkpoints" / "latest").read_text().strip() == f"step_{logged_step(folder):06d}"


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_a_stop_while_workers_start(workspace: Workspace, number: signal.Signals) -> None:
    """There is nothing to save yet, whatever the launcher is at."""
    for delay in (0.5, 2.0, 4.0, 6.0):
        process = workspace.start("out", "run.max_iters=1000000", "run.max_restarts=3", nproc=2)
        try:
            process.wait(timeout=delay)
        except Exception:
            process.send_signal(number)
        out = process.communicate(timeout=60)[0]
        assert process.returncode in (128 + number, -number), out
        assert "ranks restarted" not in out


@pytest.mark.slow
def test_a_worker_killed_again_and_again(shared_workspace: Workspace, undisturbed: Callable[[int], Run]) -> None:
    """From outside and at any moment, also while the others are being started."""
    process = shared_workspace.start("again", *INTERVALS, "run.max_restarts=6", nproc=2)
    folder = shared_workspace.path / "again"
    for step in (2, 6, 10, 14):
        wait_until(lambda step=step: logged_step(folder) >= step, process)
        os.kill(workers(process.pid)[step % 4 // 2], signal.SIGKILL)
    out = process.communicate(timeout=240)[0]
    assert process.returncode == 0, out
    assert out.count("ranks restarted") >= 4
    assert_undisturbed(Run(folder), undisturbed(2))
