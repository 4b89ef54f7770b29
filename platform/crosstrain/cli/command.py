"""The interface of the verbs of the command line, a kind of plugin."""

from __future__ import annotations

import argparse
from abc import ABC, abstractmethod
from collections.abc import Callable
from importlib import import_module
from typing import Any, ClassVar

from crosstrain.config.registry import registry


class Command(ABC):
    """A verb of the command line, registered under its name: `crosstrain NAME`.

    The first line of a subclass's docstring is its summary in `crosstrain --help`. The class is found without an
    import. Its module is imported when the verb is used, and should import the modules that take long in `run`.
    """

    function: ClassVar[str] = ""  # its Python interface, `crosstrain.NAME`, as "module:function" beside this module

    @abstractmethod
    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the flags. `crosstrain.cli.flags` has those that several verbs share, such as `--cfg-path`."""

    @abstractmethod
    def run(self, arguments: argparse.Namespace) -> int:
        """Do the work; returns the exit code. Raises UserError for a user's mistake."""


def python_function(verb: str) -> Callable[..., Any] | None:
    """Return the Python interface of a verb; None if there is no such verb, or if it has none."""
    if verb not in registry.names("command"):
        return None
    command = registry.get("command", verb)
    module, _, name = command.function.partition(":")
    return getattr(import_module(f"{command.__module__.rpartition('.')[0]}.{module}"), name) if name else None
