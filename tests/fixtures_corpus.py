"""The documents of inputs, read in this process as `crosstrain prepare` reads them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from crosstrain_plugins.builtin.commands.prepare import reader, sources

from crosstrain.config.schema import Component


def documents(given: sources.Input, **settings: Any) -> Iterator[reader.Document]:
    for source in sources.sources(given, settings):
        each = source.open()
        for task in each.tasks():
            yield from each.read(task)


def read(*given: Path | str | Component, key: str = "text", separator: str | None = None) -> list[str]:
    """Return the texts of inputs that are not blank."""
    named = [each if isinstance(each, Component) else str(each) for each in given]
    found = documents(named, text_key=key, separator=separator)
    return [document.text for document in found if document.text and not document.text.isspace()]
