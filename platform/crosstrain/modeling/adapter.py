"""The interface of adapter plugins."""

from abc import ABC, abstractmethod
from typing import Any

from crosstrain.modeling.base import Model


class Adapter(ABC):
    """A few trained parameters in a frozen model, configured by `model.adapter: {name: ..., <Options>}`.

    An adapter adds its modules before the runner gets the model. The adapter replaces the model's `weights`,
    `structure` and `export` with `Around` objects that also describe the new parameters. Every runner, checkpoint and
    export therefore supports adapters.
    """

    def __init__(self, options: Any) -> None:
        self.options = options

    @abstractmethod
    def add(self, model: Model) -> None:
        """Add the adapter to `model` and freeze all other parameters.

        Raises ConfigError if the model does not support the adapter.
        """


class Around:
    """A wrapper around a model's `weights`, `structure` or `export`; `inner` is the wrapped object.

    A subclass overrides methods; all other attributes come from `inner`.
    """

    def __init__(self, inner: Any, adapter: Any = None) -> None:
        self.inner, self.adapter = inner, adapter
        self.model: Model = inner.model

    def __getattr__(self, name: str) -> Any:
        if name == "inner" or name.startswith("__"):  # the copy module reads attributes before __init__ runs
            raise AttributeError(name)
        return getattr(self.inner, name)
