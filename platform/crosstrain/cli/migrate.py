"""`crosstrain migrate`: a project file from another program's configuration."""

import argparse
from contextlib import suppress
from pathlib import Path

from crosstrain.config.foreign_files import UNKNOWN
from crosstrain.config.foreign_keys import Origin, origins
from crosstrain.config.migration import looks_like, migrate
from crosstrain.utils.errors import DataError, UserError, os_errors_as, printable
from crosstrain.utils.program import command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, metavar="FILE", help="YAML, JSON, TOML, Python, or a script with a command")
    names = f"one of {', '.join(origins())} (default: the one whose settings the file has)"
    parser.add_argument("--from", dest="origin", metavar="NAME", help=names)
    parser.add_argument("--output", default="project.yaml", metavar="FILE", help="the project (default: project.yaml)")


def run(arguments: argparse.Namespace) -> int:
    """Write the project and say what it lacks; returns the exit code. Raises UserError for an unknown program."""
    path = arguments.output
    text, notes, ranks = migrate(arguments.file, _origin(arguments.origin, arguments.file), _count)
    problem = f"{path} cannot be written, choose another name with --output"
    with os_errors_as(UserError, problem), open(path, "x", encoding="utf-8") as file:
        file.write(text)
    sized = ("--world-size", ranks) if ranks else ()
    following = command("train", "--cfg-path", path, "--dry-run", *sized)
    first = f"give the values that are {UNKNOWN} in {path}, then: " if UNKNOWN in text else ""
    print(*(printable(note) for note in notes), f"next: {first}{following}", sep="\n")
    return 0


def _origin(name: str | None, file: Path) -> Origin:
    """Return the program of a name, or without one the program whose settings a file has."""
    known = {name: origin for stem, origin in origins().items() for name in (stem, *origin.aliases)}
    if name is None:
        with os_errors_as(UserError, f"{file}: cannot be read"):
            file.open().close()
        if (found := looks_like(file)) is None:
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
