"""`crosstrain list`: list components without importing them, and the options of one component."""

import argparse
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from crosstrain.cli.command import Command
from crosstrain.config.describe import first_comment, options
from crosstrain.config.load import model_types, preset_component, preset_files
from crosstrain.config.registry import KINDS, registry
from crosstrain.config.schema import options_class
from crosstrain.utils import paths

Row = tuple[str, str, str]


@registry.register_command("list")
class ListCommand(Command):
    """List the components that a project file can name, and their options."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "kind", nargs="?", choices=KINDS, metavar="KIND", help="kind of component: runner, model, dataset, ..."
        )
        parser.add_argument("name", nargs="?", help="name of a component or preset; shows all its options")

    def run(self, arguments: argparse.Namespace) -> None:
        """Print the components of one kind or of all kinds, or the options of one component."""
        kind, name = arguments.kind, arguments.name
        own = name and preset_component(kind, name)
        for each in [kind] if kind else KINDS:
            entries = [e for e in registry.entries(each) if name in (None, e.name) or own == e.name]
            _show(each, ((e.name, e.summary, f"{paths.show(e.file)}:{e.line}") for e in entries))
            if name is not None:
                _show("options", _options(options_class(kind, registry.get(kind, own, preset_files(kind)))))
                _show("model_type", _presets(model_types(own) if kind == "model" else {}))
            files = {
                n: file for n, file in preset_files(each).items() if name is None or preset_component(kind, n) == own
            }
            _show(f"{each} presets", _presets(files))


def _presets(files: dict[str, Path]) -> Iterator[Row]:
    return ((name, first_comment(file), paths.show(file)) for name, file in files.items())


def _options(cls: Any, prefix: str = "") -> Iterator[Row]:
    """Yield the options of a dataclass. Nested options follow their parent option, with its key as a prefix."""
    for option in options(cls):
        default = "required" if option.required else f"default: {json.dumps(option.default)}"
        yield prefix + option.name, option.meaning, option.type if option.inner else f"{option.type}; {default}"
        if option.inner:
            yield from _options(option.inner, f"{prefix}{option.name}.")


def _show(title: str, found: Iterable[Row]) -> None:
    if rows := list(found):
        print(f"{title}:")
    width = max((len(name) for name, _, _ in rows), default=0)
    for name, summary, place in rows:
        print(f"  {name:<{width}}  {summary}  [{place}]")
