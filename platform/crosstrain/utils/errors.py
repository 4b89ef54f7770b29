"""Errors that are the user's to fix: one sentence, no traceback, exit code 1."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

# Control characters but tab and newline, halves of surrogate pairs, and what turns the direction of writing around.
_STEERS_A_TERMINAL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_LONGEST = 4000
_REFUSALS = {
    errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO, errno.EACCES, errno.EPERM, errno.ENOENT,
    errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.EMFILE, errno.ENFILE,
}  # fmt: skip


class UserError(Exception):
    """Something the user can mend; its message says what, where and what to do, in one sentence."""

    @property
    def sentences(self) -> list[str]:
        """The message; for several mistakes one for each."""
        return [str(self)]


class ConfigError(UserError):
    """The configuration is wrong: unknown key, wrong type, impossible combination."""


class ConfigErrors(ConfigError):
    """Several mistakes in one configuration, sorted by file and line; `str` has a line for each."""

    def __init__(self, errors: Iterable[UserError]) -> None:
        found = {text for error in errors for text in error.sentences}
        super().__init__("\n".join(sorted(found, key=_by_line)))

    @property
    def sentences(self) -> list[str]:
        return str(self).split("\n")


class DataError(UserError):
    """Input data is missing, empty or damaged."""


class CheckpointError(UserError):
    """A checkpoint is missing, damaged or does not fit the model."""


class TrainingError(UserError):
    """Training cannot sensibly go on: divergence, endless overflow, a full disk."""


class RankLost(UserError):
    """Another rank is gone. Nothing here is wrong: all can go on from the newest checkpoint."""


@contextmanager
def explained(what: str) -> Iterator[None]:
    """Turn whatever a library raises inside into a ConfigError of one sentence about `what`; UserError passes."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise ConfigError(f"{what} ({type(error).__name__}: {first_line(error)})") from error


def _by_line(text: str) -> list[str | int]:
    """`file:12: ...` as a key that sorts by number."""
    return [int(part) if i % 2 else part for i, part in enumerate(re.split(r":(\d+):", text, maxsplit=1))]


def refusal(error: Exception) -> UserError | None:
    """What the file system refuses, such as room, as a sentence; None for any other error."""
    if not isinstance(error, OSError) or error.errno not in _REFUSALS:
        return None
    where = f"{error.filename}: " if error.filename else ""
    return UserError(f"{where}{error.strerror}; mend that, and the same command goes on from the last checkpoint")


def printable(text: str) -> str:
    """`text`, which somebody else may have written, with whatever would steer a terminal as visible escapes."""
    return _STEERS_A_TERMINAL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def first_line(error: Exception) -> str:
    """What another library's error says first; its kind where it says nothing."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def sentence(message: object) -> str:
    """The message of an error, or a text, as one line that is safe to print."""
    text = printable(" ".join(str(message).split()))
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} ..."
