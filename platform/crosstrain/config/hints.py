"""The interface of plugins that give hints about settings of other programs."""

from abc import ABC, abstractmethod
from collections.abc import Set
from pathlib import Path

from crosstrain.config.registry import registry


class Hints(ABC):
    """Hints for users who bring settings from other programs."""

    @abstractmethod
    def of_key(self, key: str) -> str | None:
        """Return a hint about the option that replaces a key of a different program; None for an unknown key.

        The hint is appended to an error message.
        """

    @abstractmethod
    def known(self) -> Set[str]:
        """Return the known keys of other programs, to recognize misspelled keys."""

    @abstractmethod
    def of_file(self, path: Path) -> str | None:
        """Return a sentence about a file if it contains settings for other programs; None for any other file."""


def hint_of_key(key: str) -> str | None:
    """Return the first hint that an installed plugin gives for a key of a different program, or None."""
    return next(filter(None, (each.of_key(key) for each in registry.instances("hints").values())), None)
