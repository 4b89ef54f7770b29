"""Forked processes that start reliably even if the parent process has threads."""

import os
from multiprocessing.connection import wait
from multiprocessing.context import ForkContext, ForkProcess
from multiprocessing.popen_fork import Popen

PATIENCE = 20.0  # seconds after which a process that has not started is killed
_TRIES = 3


class _CheckedProcess(ForkProcess):
    """A forked process that is forked again if it hangs before `run` is called.

    A fork copies locks in their current state. In Python 3.11, the child takes one of the interpreter's locks. It waits
    forever if that lock was held at the fork by a C++ thread, such as a thread of torch's collectives, that was
    releasing a Python object.
    """

    began: int  # the child's end of a pipe

    @staticmethod
    def _Popen(process_obj: "_CheckedProcess") -> Popen:  # type: ignore[override]
        for _ in range(_TRIES):
            reading, process_obj.began = os.pipe()
            child = Popen(process_obj)
            os.close(process_obj.began)
            answers = wait([reading], PATIENCE)  # not empty if the child has written or ended
            os.close(reading)
            if answers:
                return child
            child.kill()
            child.wait()
        raise OSError(f"{_TRIES} processes in a row did not start within {PATIENCE:g} s each")

    def run(self) -> None:
        os.write(self.began, b".")
        super().run()


class CheckedForkContext(ForkContext):
    """A multiprocessing context: `Process.start` returns once the process runs, or raises OSError if it never runs."""

    Process = _CheckedProcess
