"""Processes that are forked beside threads."""

from __future__ import annotations

import os
import select
from multiprocessing.context import ForkContext, ForkProcess
from multiprocessing.popen_fork import Popen

PATIENCE = 20.0  # seconds until a process that has not begun is taken for one that never will
_TRIES = 3


class _CheckedProcess(ForkProcess):
    """A forked process that is forked again where it hangs before its first line.

    A fork copies locks as they are. In Python 3.11 the child takes one of the interpreter's, which a thread of C++ that
    was just then giving back a Python object, such as one of torch's collectives, may have held; it waits forever.
    """

    began: int  # a pipe's end, for the child

    @staticmethod
    def _Popen(process_obj: _CheckedProcess) -> Popen:  # type: ignore[override]
        for _ in range(_TRIES):
            reading, process_obj.began = os.pipe()
            child = Popen(process_obj)
            os.close(process_obj.began)
            answers = select.select([reading], [], [], PATIENCE)[0]  # it has begun, or ended, which closes the pipe
            os.close(reading)
            if answers:
                return child
            child.kill()
            child.wait()
        raise OSError(f"{_TRIES} processes in a row did not begin within {PATIENCE:g} s each")

    def run(self) -> None:
        os.write(self.began, b".")
        super().run()


class CheckedForkContext(ForkContext):
    """Multiprocessing by forks that have begun when `start` returns. OSError where none begins."""

    Process = _CheckedProcess
