"""Command lines of this program, for hints that suggest a command; attribution of errors to plugins."""

import shlex
import shutil
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from crosstrain.utils.errors import TrainingError, UserError
from crosstrain.utils.paths import home, show


def command(verb: str, *arguments: object) -> str:
    """Return the command line that runs a verb, or shows `--help`, in the working directory, quoted for a shell.

    If train.py or evaluate.py of a checkout was called, the command uses these scripts. Otherwise it uses `crosstrain`
    if this environment has that program, and `python -m crosstrain` if not.
    """
    called, script = Path(sys.argv[0]), Path(sys.executable).with_name("crosstrain")
    in_checkout = called.name in ("train.py", "evaluate.py") and called.resolve().parent == home()
    own = called.with_name(f"{verb}.py")
    words: list[object] = [_as_typed(Path(sys.executable)), "-m", "crosstrain", verb]
    if in_checkout and own.exists():
        words = [words[0], own]
    elif called.name != "__main__.py" and script.exists():
        words = [_as_typed(script), verb]
    elif in_checkout:  # train.py and evaluate.py find the package without PYTHONPATH
        words = ["env", f"PYTHONPATH={home() / 'platform'}", *words]
    return shlex.join(str(word) for word in (*words, *arguments))


def _as_typed(program: Path) -> Path:
    """Return only the program's name if the shell finds this program under that name."""
    return Path(program.name) if shutil.which(program.name) == str(program) else program


@contextmanager
def blamed(what: str) -> Iterator[None]:
    """Turn a plugin's exception in the block into a TrainingError that starts with `what` and ends with the line."""
    try:
        yield
    except Exception as error:
        problem = str(error)
        if not isinstance(error, UserError):
            last = traceback.extract_tb(error.__traceback__)[-1]
            problem = f"{type(error).__name__}: {error} ({show(Path(last.filename))}:{last.lineno})"
        raise TrainingError(f"{what}: {problem}") from error
