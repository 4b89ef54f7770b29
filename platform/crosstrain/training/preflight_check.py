"""The interface of preflight plugins: checks that run before training starts."""

import argparse
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # checks declare their flags without importing torch
    from crosstrain.config.load import ProjectLike
    from crosstrain.config.sources import Overrides
    from crosstrain.training.preflight import Preflight


@dataclass(frozen=True)
class Start:
    """A training run that is about to start its workers."""

    project: "ProjectLike"
    options: "Overrides"
    ready: "Preflight"
    world_size: int
    first: bool  # this process is node 0's launcher or rank 0, and this is not a restart
    dry: bool  # only check; no worker is started


class PreflightCheck(ABC):
    """Base class of checks that run before workers start. All registered checks run."""

    @abstractmethod
    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare optional flags of `crosstrain train`; they are also keywords of `crosstrain.train`."""

    @abstractmethod
    def run(self, start: Start, given: Mapping[str, Any]) -> None:
        """Raise UserError if training cannot succeed.

        given: flag name -> value, for all flags.
        """
