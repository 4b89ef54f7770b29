"""`crosstrain list`: everything that a project file can name, found without importing any of it."""

from __future__ import annotations

import argparse

from crosstrain.config.load import preset_files
from crosstrain.config.registry import KINDS, registry
from crosstrain.utils import paths
from crosstrain.utils.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("kind", nargs="?", help="runner, model, dataset, ...")


def run(arguments: argparse.Namespace) -> int:
    """Print the components of one kind, or of all; returns the exit code."""
    kind = arguments.kind
    if kind is not None and kind not in KINDS:
        raise ConfigError(f"list: there is no kind {kind!r}; the kinds are {', '.join(KINDS)}")
    for each in [kind] if kind else KINDS:
        _show(each, [(e.name, e.summary, f"{paths.show(e.file)}:{e.line}") for e in registry.entries(each)])
        # The first line of a preset is a comment that describes it.
        files = {name: (file.read_text().splitlines()[0], file) for name, file in preset_files(each).items()}
        _show(f"{each} presets", [(name, first.lstrip("# "), paths.show(f)) for name, (first, f) in files.items()])
    return 0


def _show(title: str, rows: list[tuple[str, str, str]]) -> None:
    if rows:
        print(f"{title}:")
    width = max((len(name) for name, _, _ in rows), default=0)
    for name, summary, place in sorted(rows):
        print(f"  {name:<{width}}  {summary}  [{place}]")
