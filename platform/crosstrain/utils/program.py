"""Command lines of this program, for hints in messages, and the attribution of errors to plugins."""

import shlex
import shutil
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from crosstrain.utils.errors import TrainingError, UserError
from crosstrain.utils.paths import home, show


def command(name: str, *arguments: object) -> str:
    """Return the shell-quoted command line that runs a command in the working directory, or shows its `--help`.

    The command line runs `crosstrain` if this environment has that program, and `python -m crosstrain` otherwise.
    """
    script, source = Path(sys.executable).with_name("crosstrain"), home() / "platform"
    words: list[object] = [_as_typed(script)]
    if not script.exists():
        words = [_as_typed(Path(sys.executable)), "-m", "crosstrain"]
        if source.is_dir():  # a checkout that is not installed
            words = ["env", f"PYTHONPATH={source}", *words]
    return shlex.join(str(word) for word in (*words, name, *arguments))


def _as_typed(program: Path) -> Path:
    """Return the program's name if the shell finds this program under that name, or else its path."""
    return Path(program.name) if shutil.which(program.name) == str(program) else program


@contextmanager
def blamed(what: str) -> Iterator[None]:
    """Turn a plugin's exception in the block into a TrainingError that names `what` and the line that failed."""
    try:
        yield
    except Exception as error:
        problem = str(error)
        if not isinstance(error, UserError):
            last = traceback.extract_tb(error.__traceback__)[-1]
            problem = f"{type(error).__name__}: {error} ({show(Path(last.filename))}:{last.lineno})"
        raise TrainingError(f"{what}: {problem}") from error
