"""`crosstrain migrate`: convert a configuration of a foreign program to a project file."""

import argparse
from pathlib import Path

from crosstrain import Command, UserError, registry
from crosstrain.utils.errors import os_errors_as
from crosstrain.utils.limited_process import LimitedProcess
from crosstrain.utils.program import command

from .foreign_files import UNKNOWN, read_foreign
from .foreign_keys import origins
from .migration import UNHEARD, looks_like, migrate

_SECONDS = 15.0  # CPU time limit of a whole migration


@registry.register_command("migrate")
class MigrateCommand(Command):
    """Make a project from a configuration of another program."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "file", type=Path, metavar="FILE", help="YAML, JSON, TOML, Python, or a script with a command"
        )
        parser.add_argument(
            "--from", dest="origin", metavar="NAME", help=f"{', '.join(origins())} (default: by its keys)"
        )
        parser.add_argument(
            "--output", default="project.yaml", metavar="FILE", help="the project (default: project.yaml)"
        )

    def run(self, arguments: argparse.Namespace) -> int:
        """Write the project, print notes, and return the exit code. Raises UserError for an unknown program."""
        path = arguments.output
        read = LimitedProcess(_read, f"{arguments.file}: to read it", seconds=_SECONDS, advice="give its settings only")
        text, notes, ranks = read(arguments)
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


def _read(arguments: argparse.Namespace) -> tuple[str, list[str], int | None]:
    """Migrate the file from the program in --from, or from the program recognized by its settings."""
    file, said = arguments.file, list[str]()
    known = {name: origin for stem, origin in origins().items() for name in (stem, *origin.aliases)}
    if arguments.origin is not None:
        if (origin := known.get(arguments.origin.lower().replace("-", "_"))) is None:
            raise UserError(f"--from: there is no program {arguments.origin!r}; known: {', '.join(known)}")
    elif (origin := looks_like(file)) is not None:
        said.append(f"these are settings of {origin.name}")
    else:
        read_foreign(file)  # raises if the file cannot be read
        raise UserError(f"{file}: its settings do not tell whose they are: give --from, one of {', '.join(known)}")
    text, notes, ranks = migrate(file, origin)
    return text, said + notes, ranks
