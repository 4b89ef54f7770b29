"""The interface of checks before a training starts, a kind of plugin."""

from __future__ import annotations

import argparse
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from crosstrain.config.registry import registry

if TYPE_CHECKING:  # checks declare flags before torch is imported
    from crosstrain.config.load import ProjectLike
    from crosstrain.config.sources import Overrides
    from crosstrain.training.preflight import Preflight


@dataclass(frozen=True)
class Start:
    """A training that is about to start its workers."""

    project: ProjectLike
    options: Overrides
    ready: Preflight
    world_size: int
    fresh: bool  # the earlier run's checkpoints are kept, as a different run's
    first: bool  # this process is the first launcher, and starts for the first time
    dry: bool  # no worker will be started


class PreflightCheck(ABC):
    """A check of a training before it starts workers, registered under a name. Every one that is installed runs."""

    @abstractmethod
    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare flags of `crosstrain train`, which are keywords of `crosstrain.train` too. None is required."""

    @abstractmethod
    def run(self, start: Start, given: Mapping[str, Any]) -> None:
        """Raise UserError for a training that cannot succeed.

        given: the values of all flags, by name.
        """


def preflight_checks() -> list[PreflightCheck]:
    """Return every check that is installed, in the order of their names."""
    return [registry.get("preflight", name)() for name in registry.names("preflight")]
