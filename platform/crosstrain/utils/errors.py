"""Errors that the user can fix: one sentence, no traceback, exit code 1."""

import difflib
import errno
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

# Control characters except tab and newline, lone surrogates, and bidirectional control characters.
_STEERS_A_TERMINAL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_NO_MEMORY = re.compile("out of memory|can't allocate memory")  # messages about CUDA memory and CPU memory
_LONGEST = 4000
_REFUSALS = {
    errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO, errno.EACCES, errno.EPERM, errno.ENOENT,
    errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.EMFILE, errno.ENFILE,
}  # fmt: skip


class UserError(Exception):
    """A mistake that the user can fix. Its message is one sentence: the problem, the place and the remedy."""

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle only the message, because constructors of subclasses take other arguments."""
        return Exception.__new__, (type(self), *self.args), vars(self)

    @property
    def sentences(self) -> list[str]:
        """The message, or one message per mistake if there are several mistakes."""
        return [str(self)]


class ConfigError(UserError):
    """A wrong configuration: unknown key, wrong type, impossible combination."""


class ConfigErrors(ConfigError):
    """Several mistakes in one configuration, sorted by file and line. `str` has one line per mistake."""

    def __init__(self, errors: Iterable[UserError]) -> None:
        # Sentences such as `file:12: ...` are sorted by the number of the line.
        by_line = {
            re.sub(r":(\d+):", lambda number: f"\0{number[1]:0>12}:", text, count=1): text
            for error in errors
            for text in error.sentences
        }
        super().__init__("\n".join(by_line[key] for key in sorted(by_line)))

    @property
    def sentences(self) -> list[str]:
        return [text for text in str(self).split("\n") if text]


class DataError(UserError):
    """Missing, empty or damaged input data."""


class EmptySplit(DataError):
    """A split without samples. Arguments: the reason, and optionally advice on changing the options."""

    def __str__(self) -> str:
        return ": ".join(self.args)


class CheckpointError(UserError):
    """A checkpoint that is missing, is damaged or does not fit the model."""


class StorageError(UserError):
    """An unusable bucket: no access, no connection, or no package for its protocol."""


class TrainingError(UserError):
    """A reason to end training: divergence, endless overflow, a full disk."""


class OutOfMemory(UserError):
    """A device, or the machine, ran out of memory."""


class RankLost(UserError):
    """A rank was lost, not this one. This rank has no error, and all ranks can resume from the newest checkpoint."""


@contextmanager
def explained(what: str, kind: type[UserError] = ConfigError) -> Iterator[None]:
    """Turn an exception in the block into a one-sentence error that starts with `what`; UserErrors stay unchanged."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        deep = "it is nested too deeply" if isinstance(error, RecursionError) else None
        own = error.strerror if isinstance(error, OSError) else deep
        raise kind(f"{what} ({own or f'{type(error).__name__}: {first_line(error)}'})") from error


@contextmanager
def os_errors_as(kind: type[Exception], problem: str, *others: type[Exception]) -> Iterator[None]:
    """Turn an OSError, or one of `others`, into the exception `kind`; its message is `problem` and the reason."""
    try:
        yield
    except (OSError, *others) as error:  # type: ignore[misc]
        raise kind(f"{problem} ({getattr(error, 'strerror', None) or error})") from None


def refusal(error: Exception) -> UserError | None:
    """Return a UserError for a lack of memory, or for an OSError such as a full disk; None for any other error."""
    if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and _NO_MEMORY.search(str(error))):
        return OutOfMemory(
            f"memory ran out ({first_line(error)[:200]}): lower run.micro_batch_size, set "
            f"run.gradient_checkpointing=full or use a runner that shards; `crosstrain plan` estimates the memory"
        )
    if not isinstance(error, OSError) or error.errno not in _REFUSALS:
        return None
    where = f"{error.filename}: " if error.filename else ""
    return UserError(f"{where}{error.strerror}; fix that, and the same command resumes from the last checkpoint")


def printable(text: str) -> str:
    """Replace terminal control characters with visible escapes."""
    return _STEERS_A_TERMINAL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def nearest(name: str, known: Iterable[str], cutoff: float = 0.6) -> list[str]:
    """Return a list with the closest match for `name` in `known`, or an empty list if none is close."""
    return difflib.get_close_matches(name[:100], list(known), n=1, cutoff=cutoff)


def did_you_mean(name: str, known: Iterable[str], otherwise: str = "") -> str:
    """Return "did you mean NAME?" with the closest match for `name` in `known`, or `otherwise` if none is close."""
    near = nearest(name, known)
    return f"did you mean {near[0]}?" if near else otherwise


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its type if it has no message."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def sentence(message: object) -> str:
    """Return an error's message, or a text, as one line that is safe to print."""
    text = printable(" ".join(str(message).split()))
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} ..."
