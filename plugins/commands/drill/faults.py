"""Faults of a worker process on this machine."""

import ctypes
import errno
import os
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress

import psutil

from crosstrain import UserError

_PIDFD_GETFD = 438  # number of the system call on all Linux architectures; Python has no function for it
_SLOW = 5.0  # seconds for which a worker is slow
_TURN = 0.02  # seconds of standing and of running, in turns


def slow(worker: int) -> None:
    """Let the process run for only half of the time."""
    with suppress(ProcessLookupError):  # the run has ended
        for number in [signal.SIGSTOP, signal.SIGCONT] * int(_SLOW / _TURN / 2):
            os.kill(worker, number)
            time.sleep(_TURN)


def cut(worker: int) -> None:
    """Break the connections of the process, as a failing network does; the process itself goes on."""
    libc, process = ctypes.CDLL(None, use_errno=True), os.pidfd_open(worker)
    for connection in psutil.Process(worker).net_connections("tcp"):
        if connection.status == psutil.CONN_ESTABLISHED:
            copy = libc.syscall(_PIDFD_GETFD, process, connection.fd, 0)
            if copy < 0 and ctypes.get_errno() != errno.EBADF:  # the worker has just closed it
                raise UserError(f"--faults: cut cannot reach a worker's connections: {os.strerror(ctypes.get_errno())}")
            if copy >= 0:
                with socket.socket(fileno=copy) as taken, suppress(OSError):  # the other end has just closed it
                    taken.shutdown(socket.SHUT_RDWR)
    os.close(process)


FAULTS: dict[str, Callable[[int], None]] = {
    "kill": lambda worker: os.kill(worker, signal.SIGKILL),
    # The launcher kills a frozen worker when the other workers miss it.
    "freeze": lambda worker: os.kill(worker, signal.SIGSTOP),
    "slow": slow,
    # An operator or a scheduler ends a worker by mistake.
    "close": lambda worker: os.kill(worker, signal.SIGTERM),
    "cut": cut,
}
