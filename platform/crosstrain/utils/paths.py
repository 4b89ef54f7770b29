"""Paths of the files that come with Crosstrain, in a checkout or an installed wheel."""

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from crosstrain.utils.errors import ConfigError, nearest

_PACKAGE = Path(__file__).resolve().parent.parent


def home() -> Path:
    """Return the folder that holds plugins/, configs/ and projects/."""
    checkout = _PACKAGE.parent.parent
    return checkout if _PACKAGE.parent.name == "platform" and (checkout / "plugins").is_dir() else _PACKAGE


def find(path: str | os.PathLike[str], named_in: str = "") -> Path:
    """Return the existing file or folder `path`, in the working directory or, if it is not there, in `home()`.

    Raises ConfigError if neither folder contains `path`. The error suggests a file of this name next to `named_in`, the
    file that names `path`, because users may expect paths to be relative to that file.
    """
    wanted = Path(path).expanduser()
    candidates = [wanted] if wanted.is_absolute() else [wanted, home() / wanted]
    # `os.path.exists` is also False for an invalid name, such as one with a null byte.
    if found := next(filter(os.path.exists, candidates), None):
        return found
    if os.path.exists(beside := Path(named_in).parent / wanted):
        raise ConfigError(f"{path}: paths are relative to the working directory; did you mean {show(beside)}?")
    raise ConfigError(missing(path, candidates))


def missing(path: str | os.PathLike[str], candidates: Sequence[Path]) -> str:
    """Return an error message for a `path` that is at none of `candidates`; suggest a similar name in their folders."""
    hint = near(*candidates) or "looked in " + " and ".join(str(c.absolute()) for c in candidates)
    return f"{path}: no such file or folder; {hint}"


def near(*candidates: Path) -> str:
    """Return "did you mean NAME?" with an existing name close to one of `candidates`, or "" if none is close."""
    for candidate in candidates:
        with suppress(OSError, ValueError):
            for name in nearest(candidate.name, sorted(os.listdir(candidate.parent))):
                return f"did you mean {show(candidate.parent / name)}?"
    return ""


def show(path: Path) -> str:
    """Format `path` as a user would type it: relative to the working directory if it is inside that folder."""
    try:
        return str(path.absolute().relative_to(Path.cwd()))
    except ValueError:
        return str(path)
