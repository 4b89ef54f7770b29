"""Reading files that somebody else may have put there: regular ones alone, never a pipe, a device or a socket."""

from __future__ import annotations

import errno
import os
import stat
from io import BufferedReader
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # reading a run's folder needs no torch
    pass


def open_regular(path: str | Path, *, follow: bool = True) -> BufferedReader:
    """Open a regular file to read bytes. `follow=False` refuses a link, which could lead out of a folder.

    Raises OSError, with a `strerror` that fits a sentence, for anything else. What is not a regular file is not opened:
    to open a FIFO waits for its writer, and some devices act on it.
    """
    try:
        _check(os.stat(path, follow_symlinks=follow), path)
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if follow else os.O_NOFOLLOW))
    except ValueError:
        raise OSError(errno.EINVAL, "not a possible name of a file", str(path)) from None
    file = os.fdopen(descriptor, "rb")
    try:
        _check(os.fstat(descriptor), path)  # again: the name may mean another file by now
    except OSError:
        file.close()
        raise
    return file


def read_regular(path: str | Path, most: int, *, follow: bool = True) -> bytes:
    """The bytes of a regular file. Raises OSError as `open_regular` does, and for a file of more than `most` bytes."""
    with open_regular(path, follow=follow) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise OSError(errno.EFBIG, f"its {size} bytes are more than the {most} that are read", str(path))
        return file.read(size)


def _check(status: os.stat_result, path: str | Path) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "not a regular file", str(path))


def append(path: Path | str, data: str | bytes, folder: int | None = None) -> None:
    """Append to a file, all of `data` or, where OSError is raised, nothing.

    folder: descriptor that a relative path starts from.
    """
    data = data.encode() if isinstance(data, str) else data
    with open(path, "ab", buffering=0, opener=lambda p, flags: os.open(p, flags, 0o666, dir_fd=folder)) as file:
        size = file.seek(0, os.SEEK_END)
        try:
            while data:
                data = data[file.write(data) :]
        except OSError:
            file.truncate(size)
            if size == 0:
                os.unlink(path, dir_fd=folder)
            raise
