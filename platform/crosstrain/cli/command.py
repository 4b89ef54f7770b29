"""The interface of commands, such as `crosstrain train`. Commands are plugins."""

import argparse
from abc import ABC, abstractmethod
from collections.abc import Callable
from importlib import import_module
from typing import Any, ClassVar

from crosstrain.config.registry import registry


class Command(ABC):
    """A command, registered under its name: `crosstrain NAME`.

    The first line of a subclass's docstring is the command's summary in `crosstrain --help`, and is read without
    importing the module. The module is imported when the command is used. Import slow modules only in `run`.
    """

    function: ClassVar[str] = ""  # the Python interface, `crosstrain.NAME`, as "module:function" in the same package

    @abstractmethod
    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the flags. `crosstrain.cli.flags` has flags that several commands share, such as `--cfg-path`."""

    @abstractmethod
    def run(self, arguments: argparse.Namespace) -> int | None:
        """Run the command and return the exit code; None counts as 0. Raises UserError for a user's mistake."""


def python_function(name: str) -> Callable[..., Any] | None:
    """Return the Python interface of a command, or None if the command does not exist or has no Python interface."""
    if name not in registry.names("command"):
        return None
    command = registry.get("command", name)
    module, _, function = command.function.partition(":")
    return getattr(import_module(f"{command.__module__.rpartition('.')[0]}.{module}"), function) if function else None
