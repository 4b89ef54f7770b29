"""Report worker errors to the launcher, which decides whether a restart can help.

An error that the user has to fix is reported in one sentence, without a restart. After any other error, a restart may
help.
"""

import json
import multiprocessing
import os
import re
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from crosstrain.utils.errors import OutOfMemory, RankLost, UserError, refusal, sentence
from crosstrain.utils.processes import on_parents_death

AGAIN = "run the same command again: training resumes from the last checkpoint, if there is one"
_BROKEN = "Connection closed by peer|Connection reset by peer|Broken pipe"  # messages for a lost connection
_launcher_shows_errors = False  # True: our own launcher started this process


class WorkerFailure(Exception):
    """A worker failed with an error that is not a UserError; the message holds the traceback."""


# ---- in a worker


def run_worker(worker: Callable[..., int], args: tuple[Any, ...]) -> int:
    """Run a worker in a process started by our own launcher; an error ends the process."""
    global _launcher_shows_errors
    _launcher_shows_errors = True
    os.setpgid(0, 0)  # signals from a terminal, `timeout` or `kill -- -GROUP` reach only the launcher; it forwards them
    on_parents_death(signal.SIGKILL)  # torch chooses SIGINT, but libraries may swallow KeyboardInterrupt
    launcher = multiprocessing.parent_process()
    if launcher is not None and not launcher.is_alive():
        os._exit(1)
    try:
        result = worker(*args)
        # When the worker function has returned, torch waits for the launcher, even if the launcher is dead.
        on_parents_death(signal.SIGKILL)
        if launcher is not None and not launcher.is_alive():
            os._exit(1)
        return result
    except Exception as error:
        if is_lost_peer(str(error)):
            time.sleep(5)  # the lost rank has the real error; the launcher ends this process in the meantime
        report_error(error)
        os._exit(1)  # `os._exit` does not wait for other threads


def report_error(error: Exception) -> None:
    """Report `error` to our launcher, which prints it when this process ends; under other launchers, print it now."""
    error = refusal(error) or _lost_connection(error) or error
    if not _launcher_shows_errors:
        print(f"error: {sentence(error)}", file=sys.stderr, flush=True)
    else:
        details = {
            "message": str(error) or type(error).__name__,
            "extraInfo": {
                "user_error": isinstance(error, UserError),
                "rank_lost": isinstance(error, RankLost) if isinstance(error, UserError) else is_lost_peer(str(error)),
                "may_pass": isinstance(error, OutOfMemory),
                "short": sentence(f"{type(error).__name__}: {error}")[:300],
                "py_callstack": "".join(traceback.format_exception(error)),
                "timestamp": str(int(time.time())),
            },
        }
        with open(os.environ["TORCHELASTIC_ERROR_FILE"], "w", encoding="utf-8") as file:
            json.dump({"message": details}, file)


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
    """The first failure in a group of workers."""

    error: UserError | WorkerFailure
    summary: str  # rank and error in a few words
    is_final: bool  # a restart cannot help
    lost_another: bool  # another rank failed first, perhaps on a different machine


def first_failure(failures: Mapping[int, Any], where: str = "") -> Failure:
    """Choose the first failure; a killed rank takes precedence over ranks that lost their connection to it.

    failures: rank -> torch's ProcessFailure. where: the machine, such as " on node7"; empty for a run on a single
    machine.
    """
    ordered = sorted(failures.items(), key=lambda item: item[1].timestamp)
    killed = [(rank, f) for rank, f in ordered if f.exitcode < 0 and f.exitcode != -signal.SIGTERM]
    rank, failure = (killed or ordered)[0]
    if killed:
        name = signal.Signals(-failure.exitcode).name
        summary = f"rank {rank}{where} was killed by {name}"
        hint = f" ({_LIKELY_CAUSES[name]})" if name in _LIKELY_CAUSES else ""
        return Failure(UserError(f"{summary}{hint}; {AGAIN}"), summary, is_final=False, lost_another=False)
    data = failure.error_file_data if isinstance(failure.error_file_data, dict) else {}
    message = data.get("message", {})
    extra = message.get("extraInfo", {}) if isinstance(message, dict) else {}
    lost = bool(extra.get("rank_lost"))
    summary = f"rank {rank} lost another rank" if lost else f"rank {rank} failed with {extra.get('short', 'an error')}"
    if extra.get("user_error"):
        if lost:
            summary = message["message"].partition(";")[0]  # names the lost rank, if it is known
        return Failure(
            UserError(message["message"]),
            summary,
            is_final=not (lost or extra.get("may_pass")),
            lost_another=lost,
        )
    if "py_callstack" not in extra:  # a library called exit
        summary = f"rank {rank}{where} ended with exit code {failure.exitcode} and without a Python error"
        return Failure(
            UserError(f"{summary}; its output may show the reason; {AGAIN}"), summary, False, lost_another=False
        )
    return Failure(
        WorkerFailure(f"rank {rank} failed:\n{extra['py_callstack']}"), summary, is_final=False, lost_another=lost
    )
