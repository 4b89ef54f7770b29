"""What a cleaning rule owes the platform."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from crosstrain.config.registry import registry
from crosstrain.config.schema import Checker, Component, to_plain
from crosstrain.utils.errors import ConfigError


@dataclass(frozen=True)
class Dropped:
    """The answer of a rule that refuses a document: why, in a few words, such as `14 tokens`."""

    why: str


class Filter:
    """Keeps, changes or drops documents one at a time.

    Rules are registered as processors and run in worker processes in the order in which a recipe names them. What a
    rule does depends on its options and the document alone, so that a restart and another number of workers change
    nothing. Override one of the two methods, or both.
    """

    @dataclass
    class Options:
        """A rule without options of its own."""

    def __init__(self, options: Any) -> None:
        self.options = options

    def text(self, text: str) -> str | Dropped:
        """The text that goes on, changed or as it was; or why the document goes no further."""
        return text

    def tokens(self, count: int) -> Dropped | None:
        """Why a document of `count` tokens, its end-of-text token not counted, goes no further; None: it does."""
        return None


class TokenLimits(Filter):
    """Keeps documents of `least` to `most` tokens."""

    def __init__(self, options: Any, least: int = 0, most: int | None = None) -> None:
        super().__init__(options)
        self.least, self.most = least, most

    def tokens(self, count: int) -> Dropped | None:
        if count < self.least or (self.most is not None and count > self.most):
            return Dropped(f"{count} tokens")
        return None


def plain(rules: list[Component]) -> list[dict[str, Any]]:
    """Rules by name with their options, as JSON can hold them."""
    return [to_plain(rule) for rule in rules]


def make_filters(given: list[dict[str, Any]]) -> list[tuple[str, Filter]]:
    """(name, rule) of what `plain` gave. ConfigError for a processor that is no rule."""
    made = []
    for item in given:
        component = Checker(lambda key: "clean." + ".".join(key)).component("processor", item, ())
        cls = registry.get("processor", component.name)
        if not (isinstance(cls, type) and issubclass(cls, Filter)):
            raise ConfigError(f"clean: the processor {component.name} is not a filter for documents")
        made.append((component.name, cls(component.options)))
    return made
