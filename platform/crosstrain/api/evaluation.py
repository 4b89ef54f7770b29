"""The interface of plugins that measure a checkpoint with `crosstrain evaluate`."""

import argparse
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from crosstrain.config.registry import registry

if TYPE_CHECKING:  # evaluations declare their flags without importing torch
    from crosstrain.api.model import OpenModel
    from crosstrain.data.dataset import Split


class Evaluation(ABC):
    """Base class of evaluations other than the loss. Command-line flags select the evaluations that run.

    given: flag name -> value, for all flags of `crosstrain evaluate`.
    """

    @abstractmethod
    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare flags of `crosstrain evaluate`; they are also keywords of `crosstrain.evaluate`."""

    @abstractmethod
    def is_asked(self, given: Mapping[str, Any]) -> bool:
        """Return True if the flags ask for this evaluation. Raises UserError for flags that contradict each other."""

    def splits(self, given: Mapping[str, Any]) -> "Sequence[Split]":
        """Return the splits that `run` opens. Each split must have samples."""
        return ()

    def needs_one_process(self, given: Mapping[str, Any]) -> bool:
        """Return True if the evaluation must run in one process, as an interactive dialogue must."""
        return False

    @abstractmethod
    def run(self, model: "OpenModel", given: Mapping[str, Any]) -> Any:
        """Return the results, as JSON values to be written under the evaluation's name. Collective."""


def asked_evaluations(given: Mapping[str, Any]) -> dict[str, Evaluation]:
    """Return the evaluations that the flags ask for, by name. Raises UserError for flags that contradict each other."""
    installed: dict[str, Evaluation] = registry.instances("evaluation")
    return {name: evaluation for name, evaluation in installed.items() if evaluation.is_asked(given)}
