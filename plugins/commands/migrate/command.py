"""`crosstrain migrate`: convert a configuration of a foreign program to a project file."""

import argparse
from pathlib import Path

from crosstrain import Command, LimitedProcess, UserError, os_errors_as, registry
from crosstrain.utils.program import command

from .foreign_files import UNKNOWN, read_foreign
from .foreign_keys import origins
from .migration import UNHEARD, looks_like, migrate

_SECONDS = 15.0  # limit on the CPU time of a migration, in seconds


@registry.register_command("migrate")
class MigrateCommand(Command):
    """Make a project from a configuration of another program."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "file",
            type=Path,
            metavar="FILE",
            help="configuration to convert: YAML, JSON, TOML, Python, or a shell script with the training command",
        )
        parser.add_argument(
            "--from",
            dest="origin",
            metavar="NAME",
            help=f"program of the configuration: {', '.join(origins())} (default: recognized by its keys)",
        )
        parser.add_argument(
            "--output", default="project.yaml", metavar="FILE", help="project file to write (default: project.yaml)"
        )

    def run(self, arguments: argparse.Namespace) -> None:
        """Write the project, and print notes. Raises UserError for an unknown program."""
        path = arguments.output
        text, notes, ranks = LimitedProcess(
            _read, f"reading {arguments.file}", seconds=_SECONDS, advice="give its settings only"
        )(arguments)
        with (
            os_errors_as(UserError, f"{path} cannot be written; choose a different name with --output"),
            open(path, "x", encoding="utf-8") as file,
        ):
            file.write(text)
        following = command("train", "--cfg-path", path, "--dry-run", *(("--world-size", ranks) if ranks else ()))
        unknown = "look up the unknown settings, which the project lacks, then: "
        first = f"fill in the values that are {UNKNOWN} in {path}, then: " if UNKNOWN in text else ""
        first += unknown if any(UNHEARD in note for note in notes) else ""
        print(*notes, f"next: {first}{following}", sep="\n")


def _read(arguments: argparse.Namespace) -> tuple[str, list[str], int | None]:
    """Migrate the file. Its program is the one given with --from, or else the one that its settings identify."""
    file, said = arguments.file, list[str]()
    known = {name: origin for stem, origin in origins().items() for name in (stem, *origin.aliases)}
    if arguments.origin is not None:
        if (origin := known.get(arguments.origin.lower().replace("-", "_"))) is None:
            raise UserError(f"--from: unknown program {arguments.origin!r}; known: {', '.join(known)}")
    elif (origin := looks_like(file)) is not None:
        said.append(f"these are settings of {origin.name}")
    else:
        read_foreign(file)  # `read_foreign` raises an error if the file cannot be read
        raise UserError(
            f"{file}: cannot recognize the program of these settings; give --from, one of {', '.join(known)}"
        )
    text, notes, ranks = migrate(file, origin)
    return text, said + notes, ranks
