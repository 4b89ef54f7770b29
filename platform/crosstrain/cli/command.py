"""The interface of the verbs of the command line, a kind of plugin."""

from __future__ import annotations

import argparse
from abc import ABC, abstractmethod
from typing import Any, ClassVar


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


class PreflightCheck(ABC):
    """A check of a training before it starts workers, registered under a name; all that are installed are run."""

    @abstractmethod
    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare flags of `crosstrain train`."""

    @abstractmethod
    def run(self, ready: Any, given: dict[str, Any]) -> None:
        """Raise UserError for a training that cannot succeed. given: the values of the flags, by their names."""
