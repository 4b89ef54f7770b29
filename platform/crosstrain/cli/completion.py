"""Shell completion with argcomplete: eval "$(register-python-argcomplete crosstrain)". Imports no plugin."""

import argparse

import argcomplete

from crosstrain.config.load import preset_files
from crosstrain.config.registry import KINDS, registry


def complete(parser: argparse.ArgumentParser, verb: argparse.ArgumentParser) -> None:
    """Print the possible next words for the shell, and exit."""
    completers = {
        "kind": lambda **_: KINDS,
        "name": lambda parsed_args, **_: [*registry.names(parsed_args.kind), *preset_files(parsed_args.kind)],
        "runners": lambda **_: [*registry.names("runner"), *preset_files("runner")],
    }
    for action in verb._actions:
        if action.choices is None and action.dest in completers:
            action.completer = completers[action.dest]  # type: ignore[attr-defined]
    argcomplete.autocomplete(parser)
