"""What an `input` stands for: readers, and the files that each is to read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from itertools import groupby
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from crosstrain.config.registry import registry
from crosstrain.config.schema import Checker, Component, options_class, to_plain
from crosstrain.corpus import io
from crosstrain.corpus.download import is_url
from crosstrain.corpus.reader import Document, Reader
from crosstrain.utils.errors import ConfigError, DataError, UserError

Input = str | Component | list[str | Component]
_ANY_FILE = "text"  # the reader of a file that is named and that no reader claims


@dataclass(frozen=True)
class InputSource:
    """A reader by name, its options as plain data, and what the recipe calls it. It can be pickled."""

    reader: str
    options: dict[str, Any]
    label: str
    files: tuple[Path, ...] | None = None  # where a search has found them already

    def open(self) -> Reader:
        cls = registry.get("reader", self.reader)
        checker = Checker(lambda key: f"reader {self.reader}: {'.'.join(key)}")
        reader = cls(checker.dataclass(options_class("reader", cls), self.options, ()))
        if self.files is not None:
            reader.found = list(self.files)
        return reader

    def for_workers(self) -> InputSource:
        """The same without the list of files, which may be long and which only the one that leads needs."""
        return replace(self, files=None)


def sources(given: Input, settings: dict[str, Any]) -> list[InputSource]:
    """Readers for what `given` names, in order.

    settings: what a recipe says for all of its readers, such as text_key. DataError for what is missing or is empty.
    """
    items = given if isinstance(given, list) else [given]
    if not items:
        raise DataError("no input is named: give files, folders, or readers with their options")
    return [source for item in items for source in _of(item, settings)]


def documents(given: Input, **settings: Any) -> Iterator[Document]:
    """Every document of the inputs in order, read in this process."""
    for source in sources(given, settings):
        reader = source.open()
        for task in reader.tasks():
            yield from reader.read(task)


def _of(item: str | Component, settings: dict[str, Any]) -> Iterator[InputSource]:
    if isinstance(item, Component):
        options = to_plain(item.options) or {}
        yield InputSource(item.name, options, str(options.get("path", item.name)))
        return
    if item in registry.names("reader") and not _takes_path(_class(item)):
        yield InputSource(item, _settings(item, settings), item)
        return
    if is_url(item):
        remote = _claiming_name(urlsplit(item).path) or _ANY_FILE
        yield InputSource(remote, {"path": item, **_settings(remote, settings)}, item)
        return
    path = io.existing(item)
    name = _claiming(path) or (_ANY_FILE if path.is_file() else None)
    if name is not None:
        yield InputSource(name, {"path": item, **_settings(name, settings)}, item)
        return
    found = [(file, owner) for file in io.files_below(path) if (owner := _claiming(file))]
    if not found:
        endings = sorted({suffix for cls in _classes().values() for suffix in cls.suffixes})
        raise io.nothing_in(path, ", ".join(endings[:-1]) + " or " + endings[-1])
    for owner, group in groupby(found, key=lambda pair: pair[1]):
        files = tuple(file for file, _ in group)
        yield InputSource(owner, {"path": item, **_settings(owner, settings)}, item, files)


def _claiming(path: Path) -> str | None:
    """The reader of a file or folder. ConfigError where several want it."""
    names = [name for name, cls in _classes().items() if cls.claims(path)]
    if len(names) > 1:
        raise ConfigError(
            f"input: {path} can be read as {' and as '.join(names)}: say which, as {{name: ..., path: ...}}"
        )
    return names[0] if names else None


def _claiming_name(path: str) -> str | None:
    """The reader of a file that is not here yet, by its name."""
    plain = io.plain_name(Path(path)).lower()
    return next((name for name, cls in _classes().items() if plain.endswith(cls.suffixes or ("\0",))), None)


def _classes() -> dict[str, type[Reader]]:
    """The readers that can be imported; one that cannot stands in nobody's way until it is named."""
    found = {}
    for name in registry.names("reader"):
        try:
            found[name] = _class(name)
        except UserError:
            continue
    return found


def _class(name: str) -> type[Reader]:
    return registry.get("reader", name)


def _takes_path(cls: type[Reader]) -> bool:
    return "path" in {field.name for field in fields(options_class("reader", cls))}


def _settings(name: str, settings: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in settings.items() if key in _class(name).shared_options}
