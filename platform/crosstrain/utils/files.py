"""Read only regular files, and replace files atomically."""

import errno
import json
import os
import re
import secrets
import stat
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path
from typing import IO, Any


def open_regular(path: str | Path, *, follow: bool = True) -> BufferedReader:
    """Open a regular file to read bytes. `follow=False` refuses links, because they may lead out of a folder.

    Raises OSError if the file cannot be opened; its `strerror` fits into an error message. Other kinds of files are
    never opened: opening a FIFO waits for its writer, and opening some devices has side effects.
    """
    try:
        _check_regular(os.stat(path, follow_symlinks=follow), path)
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if follow else os.O_NOFOLLOW))
    except ValueError:
        raise OSError(errno.EINVAL, "not a valid file name", str(path)) from None
    file = os.fdopen(descriptor, "rb")
    try:
        _check_regular(os.fstat(descriptor), path)  # check again: the file may have been replaced
    except OSError:
        file.close()
        raise
    return file


def read_regular(path: str | Path, most: int, *, follow: bool = True) -> bytes:
    """Read a regular file. Raises OSError like `open_regular`, and for a file of more than `most` bytes."""
    with open_regular(path, follow=follow) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise OSError(errno.EFBIG, f"its {size} bytes exceed the limit of {most}", str(path))
        return file.read(size)


def read_end(path: Path, most: int) -> list[str]:
    """Return the lines in a file's last `most` bytes; the first line may be cut. Raises OSError like `open_regular`."""
    with open_regular(path, follow=False) as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - most))
        return file.read(most).decode("utf-8", errors="replace").splitlines()


def _check_regular(status: os.stat_result, path: str | Path) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "not a regular file", str(path))


def last_checkpoint(path: Path) -> Path:
    """Return the last checkpoint of a run's folder. Any other path is returned unchanged."""
    with suppress(OSError):
        latest = read_regular(path / "checkpoints" / "latest", 100, follow=False).decode("ascii", "replace").strip()
        if re.fullmatch(r"step_[0-9]+", latest):
            return path / "checkpoints" / latest
    return path


def cache_folder(kind: str) -> Path:
    """Return the user's cache folder for one kind of file. The folder may not exist."""
    return Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "crosstrain" / kind


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """Yield a temporary file that replaces `path` when the block ends. After an error, `path` is unchanged.

    Several processes, even on different machines, may replace the same file at the same time. Raises OSError if writing
    fails.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        with open(temporary, "wb") as file:
            yield file
        os.replace(temporary, path)
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def write_atomically(path: Path, data: str | bytes) -> None:
    """Replace a file. On failure, raises OSError and keeps the previous file."""
    with replacing(path) as file:
        file.write(data.encode() if isinstance(data, str) else data)


def write_json(path: Path, value: Any, indent: int | None = 2) -> None:
    """Write a JSON file with `write_atomically`. With `indent=None`, the JSON is on one line."""
    write_atomically(path, json.dumps(value, indent=indent) + "\n")


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build a JSON object, as an `object_pairs_hook` of json. Raises ValueError for a duplicate key.

    With duplicate keys, a viewer may show the first value while a program uses the second.
    """
    made = dict(pairs)
    if len(made) < len(pairs):
        (name, _), *_ = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"it has the key {name!r} twice")
    return made


def append(path: Path, data: str | bytes) -> None:
    """Append `data` to a file. On failure, raises OSError and leaves the file unchanged."""
    data = data.encode() if isinstance(data, str) else data
    with open(path, "ab", buffering=0) as file:
        size = file.seek(0, os.SEEK_END)
        try:
            while data:
                data = data[file.write(data) :]
        except OSError:
            file.truncate(size)
            if size == 0:
                os.unlink(path)
            raise
