"""The interface of adapter plugins."""

from abc import ABC, abstractmethod
from typing import Any

from crosstrain.modeling.base import Model


class Adapter(ABC):
    """A few trained parameters on a frozen model. `model.adapter: {name: ..., <Options>}` chooses and configures one.

    An adapter changes the model in place, before a runner sees it. What it adds must be described as a model's own
    parameters are (`Model.canonical_name`, `initialize`, `tensor_parallel_plan`, `pretrained_sources`), so that every
    runner, checkpoint and export takes it without knowing of it.
    """

    def __init__(self, options: Any) -> None:
        self.options = options

    @abstractmethod
    def add(self, model: Model) -> None:
        """Add the adapter to `model` and freeze the rest. Raises ConfigError for a model that it does not fit."""
