"""The interface of filter plugins: a filter keeps, changes or drops documents."""

from dataclasses import dataclass
from typing import Any

from crosstrain import ConfigError, registry
from crosstrain.config.schema import Checker


@dataclass(frozen=True)
class Dropped:
    """A filter's result for a document that it drops, with a short reason, such as `14 tokens`."""

    reason: str


class Filter:
    """A filter of documents, one at a time. Override `text`, `tokens` or both.

    Filters are registered as processors. They run in worker processes, in the order of the recipe. A result must depend
    only on the options and the document, so that neither a restart nor the number of workers can change it.
    """

    def __init__(self, options: Any) -> None:
        self.options = options

    def text(self, text: str) -> str | Dropped:
        """Return the text, changed or unchanged, or `Dropped`."""
        return text

    def tokens(self, count: int) -> Dropped | None:
        """Return `Dropped` to drop a document of `count` tokens (excluding the end-of-text token), else None."""
        return None


def make_filters(given: list[dict[str, Any]]) -> list[tuple[str, Filter]]:
    """Create (name, filter) pairs from components as plain data. Raises ConfigError if a processor is not a filter."""
    made = []
    for item in given:
        component = Checker(lambda key: "clean." + ".".join(key)).component("processor", item, ())
        cls = registry.get("processor", component.name)
        if not (isinstance(cls, type) and issubclass(cls, Filter)):
            raise ConfigError(f"clean: the processor {component.name} is not a filter for documents")
        made.append((component.name, cls(component.options)))
    return made
