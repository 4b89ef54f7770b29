"""Report worker errors to the launcher, which decides whether a restart can help.

An error that the user has to fix is reported in one sentence, without a restart. After any other error, a restart may
help.
"""

import multiprocessing
import os
import re
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

from crosstrain.utils.errors import OutOfMemory, RankLost, UserError, refusal, sentence
from crosstrain.utils.processes import on_parents_death

AGAIN = "run the same command again: training resumes from the last checkpoint, if there is one"
_BROKEN = "Connection closed by peer|Connection reset by peer|Broken pipe"  # messages for a lost connection
_report: Callable[[dict[str, Any]], None] | None = None  # sends an error to our own launcher; None: it did not start us


class WorkerFailure(Exception):
    """A worker failed with an error that is not a UserError; the message holds the traceback."""


# ---- in a worker


def run_worker(worker: Callable[..., int], args: tuple[Any, ...], report: Callable[[dict[str, Any]], None]) -> int:
    """Run a worker in a process started by our own launcher; an error ends the process.

    report: sends an error to the launcher.
    """
    global _report
    _report = report
    os.setpgid(0, 0)  # signals from a terminal, `timeout` or `kill -- -GROUP` reach only the launcher; it forwards them
    on_parents_death(signal.SIGKILL)
    launcher = multiprocessing.parent_process()
    if launcher is not None and not launcher.is_alive():
        os._exit(1)
    try:
        return worker(*args)
    except Exception as error:
        if is_lost_peer(str(error)):
            time.sleep(5)  # the lost rank has the real error; the launcher ends this process in the meantime
        report_error(error)
        os._exit(1)  # `os._exit` does not wait for other threads


def report_error(error: Exception) -> None:
    """Report `error` to our launcher, which prints it when this process ends; under other launchers, print it now."""
    error = refusal(error) or _lost_connection(error) or error
    if _report is None:
        print(f"error: {sentence(error)}", file=sys.stderr, flush=True)
    else:
        by_user = isinstance(error, UserError)
        details = {
            "message": str(error),
            "user_error": by_user,
            "rank_lost": isinstance(error, RankLost) if by_user else is_lost_peer(str(error)),
            "may_pass": isinstance(error, OutOfMemory),
            "short": sentence(f"{type(error).__name__}: {error}")[:300],
            "traceback": "".join(traceback.format_exception(error)),
        }
        _report(details)


def exit_silently(seconds: float) -> NoReturn:
    """Exit with code 1 after `seconds`, without further output, because the error has already been reported."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    time.sleep(seconds)
    os._exit(1)


def _lost_connection(error: Exception) -> RankLost | None:
    """Return a one-sentence error for a broken connection to another rank; None for other errors."""
    cause = error.__cause__ if isinstance(error, RankLost) else error  # a failed save raises RankLost from the cause
    broken = re.search(f"{_BROKEN}|ncclRemoteError", str(cause))
    if broken is None or not isinstance(cause, RuntimeError):
        return None
    address = re.search(r"\[([0-9a-f.:]+)\]:\d+", str(cause))
    rank, host, other = os.environ.get("RANK", "0"), socket.gethostname(), f" at {address[1]}" if address else ""
    return RankLost(
        f"rank {rank} on {host} lost its connection to another rank{other} ({broken[0]}); that rank ended, or its "
        f"machine was lost: see the error in the launcher's output there (docs/launching.md, Logs), then {AGAIN}"
    )


def is_lost_peer(text: str) -> bool:
    return re.search(f"{_BROKEN}|NCCL", text) is not None


# ---- in the launcher

_LIKELY_CAUSES = {
    "SIGKILL": "the kernel does this when memory runs out",
    "SIGBUS": "a file was truncated while it was read, its disk failed, or /dev/shm is full",
}


@dataclass(frozen=True)
class Failure:
    """The failure of a worker."""

    error: UserError | WorkerFailure
    summary: str  # rank and error in a few words
    is_final: bool = False  # a restart cannot help
    lost_another: bool = False  # another rank failed first, perhaps on a different machine


def failure_of(rank: int, code: int, details: dict[str, Any] | None, where: str = "") -> Failure:
    """Describe the failure of a worker.

    code: its exit code. details: its report of the error, if there is one. where: the machine, such as " on node7";
    empty for a run on a single machine.
    """
    if code < 0 and code != -signal.SIGTERM:
        name = signal.Signals(-code).name
        summary = f"rank {rank}{where} was killed by {name}"
        hint = f" ({_LIKELY_CAUSES[name]})" if name in _LIKELY_CAUSES else ""
        return Failure(UserError(f"{summary}{hint}; {AGAIN}"), summary)
    if details is None:  # a library called exit
        summary = f"rank {rank}{where} ended with exit code {code} and without a Python error"
        return Failure(UserError(f"{summary}; its output may show the reason; {AGAIN}"), summary)
    lost, message = details["rank_lost"], details["message"]
    summary = f"rank {rank} lost another rank" if lost else f"rank {rank} failed with {details['short']}"
    if not details["user_error"]:
        return Failure(WorkerFailure(f"rank {rank} failed:\n{details['traceback']}"), summary, lost_another=lost)
    if lost:
        summary = message.partition(";")[0]  # names the lost rank, if it is known
    return Failure(UserError(message), summary, is_final=not (lost or details["may_pass"]), lost_another=lost)
