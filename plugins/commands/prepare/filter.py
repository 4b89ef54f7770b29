"""The interface of filter plugins: a filter keeps, changes or drops documents."""

from dataclasses import dataclass
from typing import Any

from crosstrain import ConfigError, registry
from crosstrain.config.schema import Checker


@dataclass(frozen=True)
class Dropped:
    """The result of a filter that drops a document, with a short reason, such as `14 tokens`."""

    reason: str


class Filter:
    """A filter that processes one document at a time. Override `text`, `tokens` or both.

    Filters are registered as processors, and run in worker processes in the order of the recipe. A result must depend
    only on the options and the document, so that neither a restart nor the number of workers changes the result.
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
    """Create (name, filter) pairs from names and options. Raises ConfigError if a processor is not a filter."""
    made = []
    for item in given:
        component = Checker(lambda key: "clean." + ".".join(key)).component("processor", item, ())
        cls = registry.get("processor", component.name)
        if not (isinstance(cls, type) and issubclass(cls, Filter)):
            raise ConfigError(f"clean: the processor {component.name} is not a filter for documents")
        made.append((component.name, cls(component.options)))
    return made
