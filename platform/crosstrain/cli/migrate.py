"""`crosstrain migrate`: a project file from another program's configuration."""

import argparse
from contextlib import suppress
from pathlib import Path

from crosstrain.config.foreign_files import UNKNOWN, read_foreign
from crosstrain.config.foreign_keys import Origin, origins
from crosstrain.config.migration import UNHEARD, looks_like, migrate
from crosstrain.utils.errors import DataError, UserError, os_errors_as
from crosstrain.utils.program import command
from crosstrain.utils.resource_limits import OutOfTime, timed

_SECONDS = 15  # of computing, for a whole migration


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, metavar="FILE", help="YAML, JSON, TOML, Python, or a script with a command")
    parser.add_argument("--from", dest="origin", metavar="NAME", help=f"{', '.join(origins())} (default: by its keys)")
    parser.add_argument("--output", default="project.yaml", metavar="FILE", help="the project (default: project.yaml)")


def run(arguments: argparse.Namespace) -> int:
    """Write the project and say what it lacks; returns the exit code. Raises UserError for an unknown program."""
    path = arguments.output
    try:
        with timed(_SECONDS):
            text, notes, ranks = migrate(arguments.file, _origin(arguments.origin, arguments.file), _count)
    except OutOfTime:
        raise UserError(f"{arguments.file}: to read it takes more than {_SECONDS} s; give its settings only") from None
    with (
        os_errors_as(UserError, f"{path} cannot be written, choose another name with --output"),
        open(path, "x", encoding="utf-8") as file,
    ):
        file.write(text)
    following = command("train", "--cfg-path", path, "--dry-run", *(("--world-size", ranks) if ranks else ()))
    unknown = "look up the settings that are not known, as the project lacks them, then: "
    first = f"give the values that are {UNKNOWN} in {path}, then: " if UNKNOWN in text else ""
    first += unknown if any(UNHEARD in note for note in notes) else ""
    print(*notes, f"next: {first}{following}", sep="\n")
    return 0


def _origin(name: str | None, file: Path) -> Origin:
    """Return the program of a name, or without one the program whose settings a file has."""
    known = {name: origin for stem, origin in origins().items() for name in (stem, *origin.aliases)}
    if name is None:
        if (found := looks_like(file)) is None:
            read_foreign(file)  # raises for a file that cannot be read
            raise UserError(f"{file}: its settings do not tell whose they are: give --from, one of {', '.join(known)}")
        print(f"these are settings of {found.name}")
        return found
    if (wanted := name.lower().replace("-", "_")) not in known:
        raise UserError(f"--from: there is no program {name!r}; known: {', '.join(known)}")
    return known[wanted]


def _count(*files: str) -> int | None:
    """Return the number of ids of a tokenizer, or of GPT-2's two files; None where they cannot be read."""
    from crosstrain.data.tokenizer import load_gpt2, load_tokenizer

    with suppress(DataError):
        return (load_gpt2(*files) if len(files) > 1 else load_tokenizer(*files)).vocab_size
    return None
