"""The interface of plugins that give hints about settings of other programs."""

from abc import ABC, abstractmethod
from collections.abc import Set
from pathlib import Path

from crosstrain.config.registry import registry


class Hints(ABC):
    """Hints for users who bring settings from other programs."""

    @abstractmethod
    def of_key(self, key: str) -> str | None:
        """Return a clause about our option for a key of other programs; None for an unknown key."""

    @abstractmethod
    def known(self) -> Set[str]:
        """Return the known keys of other programs, to recognize misspelled ones."""

    @abstractmethod
    def of_file(self, path: Path) -> str | None:
        """Return a sentence about a file if it contains settings for other programs; None for any other file."""


def hints() -> list[Hints]:
    """Return the installed hints."""
    return [registry.get("hints", name)() for name in registry.names("hints")]


def hint_of_key(key: str) -> str | None:
    """Return the first clause from the installed hints about a key of other programs, or None."""
    return next(filter(None, (each.of_key(key) for each in hints())), None)
