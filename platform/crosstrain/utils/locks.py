"""Lock files that go away."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def locked(path: Path, *, wait: bool) -> Iterator[None]:
    """Hold the lock file `path`, which is removed afterwards. BlockingIOError if another has it, unless we `wait`."""
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            if os.fstat(file).st_nlink:  # else its last holder has removed it
                try:
                    yield
                finally:
                    path.unlink(missing_ok=True)  # before it is given back
                return
        finally:
            os.close(file)
