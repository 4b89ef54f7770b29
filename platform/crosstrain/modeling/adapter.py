"""The interface of adapter plugins."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from crosstrain.modeling.base import Model


class Adapter(ABC):
    """A few trained parameters on a frozen model. `model.adapter: {name: ..., <Options>}` chooses and configures one.

    An adapter adds modules to the model, before a runner sees it, and puts objects `Around` the model's `weights`,
    `structure` and `export`, which describe the new parameters as the model describes its own. So every runner,
    checkpoint and export takes it.
    """

    def __init__(self, options: Any) -> None:
        self.options = options

    @abstractmethod
    def add(self, model: Model) -> None:
        """Add the adapter to `model` and freeze the rest. Raises ConfigError for a model that it does not fit."""


class Around:
    """An object in the place of a model's `weights`, `structure` or `export`, which it holds as `inner`.

    A subclass defines what it changes; everything else is `inner`'s.
    """

    def __init__(self, inner: Any, adapter: Any = None) -> None:
        self.inner, self.adapter = inner, adapter
        self.model: Model = inner.model

    def __getattr__(self, name: str) -> Any:
        if name == "inner" or name.startswith("__"):  # asked for before __init__, by copy
            raise AttributeError(name)
        return getattr(self.inner, name)
