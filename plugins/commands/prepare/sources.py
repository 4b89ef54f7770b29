"""Resolve the `input` of a recipe into readers and their files."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, fields
from itertools import groupby
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from crosstrain import Component, ConfigError, DataError, FileReader, UserError, log, printable, registry, to_plain
from crosstrain.config.schema import Checker, options_class
from crosstrain.utils import storage

from . import io

Input = str | Component | list[str | Component]


@dataclass(frozen=True)
class InputSource:
    """A picklable description of a reader: its name, its options as a dict, and its label in the report."""

    reader: str
    options: dict[str, Any]
    label: str
    files: tuple[Path, ...] | None = None  # the files, if a search has already found them
    chosen_by_ending: bool = True  # False: the recipe names the reader

    def open(self) -> FileReader:
        """Make the reader."""
        cls = registry.get("reader", self.reader)
        checker = Checker(lambda key: f"reader {self.reader}: {'.'.join(key)}")
        reader = cls(checker.dataclass(options_class("reader", cls), self.options, ()))
        reader.chosen_by_ending = self.chosen_by_ending
        reader.known_files = self.files
        return reader


def sources(given: Input, settings: dict[str, Any]) -> list[InputSource]:
    """Return the readers for an input, in order.

    settings: options that a recipe sets for all its readers, such as text_key. Raises DataError if an input is missing
    or empty.
    """
    items = given if isinstance(given, list) else [given]
    if not items:
        raise DataError("no input is given: name files, folders, or readers with their options")
    return [source for item in items for source in _resolve(item, settings)]


def _resolve(item: str | Component, settings: dict[str, Any]) -> Iterator[InputSource]:
    if isinstance(item, Component):
        options = to_plain(item.options) or {}
        yield InputSource(item.name, options, str(options.get("path", item.name)), chosen_by_ending=False)
        return

    def source(name: str, path: str | None = item, files: tuple[Path, ...] | None = None) -> InputSource:
        options = {key: value for key, value in settings.items() if key in _option_names(name)}
        return InputSource(name, options if path is None else {"path": path} | options, item, files)

    if item in registry.names("reader") and "path" not in _option_names(item):
        yield source(item, None)
        return
    if storage.is_url(item) and item.endswith("/"):
        names = sorted(storage.files(item))
        inside = [name for name in names if _claiming(Path(name))]
        if not inside:
            raise DataError(f"{item} holds no file that a reader supports")
        _name_others(item, [name for name in names if name not in inside])
        for name in inside:
            yield from _resolve(storage.join(item, name), settings)
        return
    is_url = storage.is_url(item)
    path = Path(urlsplit(item).path) if is_url else io.existing(item)
    suffixes = sorted({suffix for cls in _readers().values() for suffix in cls.suffixes})
    wanted = ", ".join(suffixes[:-1]) + " or " + suffixes[-1]
    if is_url or path.is_file():
        if (reader := _claiming(path)) is not None:
            yield source(reader)
            return
        kind, advice = ("", "") if is_url else io.kind_of(path)
        about = f"is of the kind {kind}: {advice}" if kind else "is of an unknown kind: rename it"
        raise DataError(
            f"{item} {about}; or name its reader, as {{name: text, path: {item}}}; known suffixes: {wanted}"
        )
    owners = {file: _claiming(file) for file in io.files_below(path)}
    found = [(file, owner) for file, owner in owners.items() if owner]
    if not found:
        raise io.nothing_in(path, wanted)
    _name_others(item, [file.name for file, owner in owners.items() if not owner])
    for owner, group in groupby(found, key=lambda pair: pair[1]):
        yield source(owner, files=tuple(file for file, _ in group))


def _option_names(reader: str) -> set[str]:
    return {field.name for field in fields(options_class("reader", registry.get("reader", reader)))}


def _name_others(folder: str, names: list[str]) -> None:
    """Warn that no reader accepts these files of a folder."""
    if names:
        first = printable(names[0])  # a file name need not be UTF-8
        log.warning("%s: %d files are not read, such as %s: no reader supports that suffix", folder, len(names), first)


def _claiming(path: Path) -> str | None:
    """Return the default reader of a file, or None. Raises ConfigError if several readers accept the file."""
    names = [name for name, cls in _readers().items() if io.has_suffix(path, cls.suffixes)]
    if len(names) > 1:
        raise ConfigError(
            f"input: {path} can be read as {' and as '.join(names)}: name its reader, as {{name: ..., path: ...}}"
        )
    return names[0] if names else None


def _readers() -> dict[str, type[FileReader]]:
    """Return the readers that can be imported; a broken reader is an error only if the recipe names it."""
    found = {}
    for name in registry.names("reader"):
        with suppress(UserError):
            found[name] = registry.get("reader", name)
    return found
