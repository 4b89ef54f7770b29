"""A Sphinx extension that writes docs/reference/: the verbs, the options of every component, the public Python names.

Options are read from the dataclasses that the checker of configurations uses, and their meanings from the comments
beside the fields.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import json
import re
import types
from collections.abc import Iterator
from dataclasses import is_dataclass
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

from annotated_types import Ge, GroupedMetadata, Gt, Le, Lt, MinLen
from sphinx.application import Sphinx
from sphinx.util import logging

import crosstrain
from crosstrain.cli.command import python_function
from crosstrain.cli.main import parse
from crosstrain.config.describe import meanings, options
from crosstrain.config.load import preset_files
from crosstrain.config.registry import KINDS, registry
from crosstrain.config.run_options import RunOptions
from crosstrain.config.schema import Component, NoOptions, options_class
from crosstrain.utils.errors import UserError

FOLDER = Path(__file__).parent / "reference"
WORDS = {bool: "true or false", int: "whole number", float: "number", str: "text", type(None): "null", dict: "mapping"}
OF_THE_COMMAND_LINE = ("command", "evaluation", "preflight", "hints")  # kinds that a project file does not name
SIGNS = {Ge: "≥", Gt: ">", Le: "≤", Lt: "<"}

log = logging.getLogger(__name__)


class Row(NamedTuple):
    """An option, as a row of a table."""

    key: str
    type: str
    default: str
    meaning: str


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("builder-inited", write)
    app.connect("autodoc-process-docstring", describe_fields)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def write(app: Sphinx) -> None:
    """Write the pages. An unchanged page keeps its modification time, so that Sphinx does not read it again."""
    pages = {
        "commands": commands(),
        "options": contents("Options", "The options of a project file, by section and component."),
        "options-run": run_page(),
        "python": contents("Python", "The public names: `from crosstrain import Runner, registry`."),
    }
    pages |= {f"options-{kind}": kind_page(kind) for kind in KINDS if kind not in OF_THE_COMMAND_LINE}
    pages |= {f"python-{package}": page for package, page in python_pages()}
    FOLDER.mkdir(exist_ok=True)
    for stale in {path.stem for path in FOLDER.glob("*.md")} - set(pages):
        (FOLDER / f"{stale}.md").unlink()
    for name, text in pages.items():
        path = FOLDER / f"{name}.md"
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")


def contents(title: str, intro: str) -> str:
    """Return a page that lists the pages below it in docs/navigation.yml."""
    return f"# {title}\n\n{intro}\n\n```{{tableofcontents}}\n```\n"


# ---- the command line


def verbs() -> dict[str, str]:
    """Return verb -> summary of the command line."""
    return {entry.name: entry.summary for entry in registry.entries("command")}


def commands() -> str:
    """Return the page of the verbs, with the output of `--help` for each verb."""
    parts = ["# Commands\n\n`crosstrain VERB --help` prints the same text.\n"]
    for verb, summary in verbs().items():
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
            parse([verb, "--help"])
        parts.append(f"## {verb}\n\n{summary}\n\n```text\n{printed.getvalue().rstrip()}\n```\n")
    return "\n".join(parts)


# ---- options


def run_page() -> str:
    intro = "The section `run` of a project file. [Configuration](../configuration.md) groups the keys by purpose."
    return f"# Options of a run\n\n{intro}\n\n{table(RunOptions)}"


def kind_page(kind: str) -> str:
    """Return the page of a kind: its components, their options, and the presets."""
    parts = [f"# Components: {kind.replace('_', ' ')}\n\n`crosstrain list {kind}` prints the names.\n"]
    for name in registry.names(kind):
        parts.append(f"## {name}\n")
        try:
            component = registry.get(kind, name)
        except UserError as error:
            log.warning("%s %s: %s", kind, name, error)
            continue
        parts.append(docstring(component))
        cls = options_class(kind, component)
        parts.append("It has no options.\n" if cls is NoOptions else table(cls))
    if presets := preset_files(kind):
        parts.append("## Presets\n\n| name | meaning |\n|---|---|")
        first_lines = {name: file.read_text().splitlines()[0].lstrip("# ") for name, file in presets.items()}
        parts += [f"| `{name}` | {escape(line)} |" for name, line in first_lines.items()]
    return "\n".join(parts) + "\n"


def docstring(component: Any) -> str:
    """Return a component's docstring as Markdown; indented lines become code blocks."""
    text = inspect.getdoc(component) or ""
    return re.sub(r"(?m)^((?:    .*\n?)+)", r"```text\n\1```\n", text) + "\n"


def table(cls: type) -> str:
    lines = ["| key | type | default | meaning |", "|---|---|---|---|"]
    lines += [f"| `{r.key}` | {escape(r.type)} | {escape(r.default)} | {escape(r.meaning)} |" for r in rows(cls)]
    return "\n".join(lines) + "\n"


def rows(cls: type, prefix: str = "") -> Iterator[Row]:
    """Yield the options of a dataclass. Options of a nested dataclass follow, with its key as a prefix."""
    for option in options(cls):
        default = "" if option.inner and option.default else plain(option.default)
        default = "required" if option.required else default
        yield Row(prefix + option.name, in_words(option.hint), default, option.meaning)
        if option.inner:
            yield from rows(option.inner, f"{prefix}{option.name}.")


def plain(value: Any) -> str:
    if isinstance(value, dict) and list(value) == ["name"]:
        value = value["name"]
    return f"`{value}`" if isinstance(value, str) and value else f"`{json.dumps(value)}`"


def in_words(hint: Any) -> str:
    """Return a type and its bounds in words: `whole number ≥ 1 or null`."""
    origin, arguments = get_origin(hint) or hint, get_args(hint)
    if origin is Annotated:
        if arguments[0] is Component:
            return f"a {arguments[1].replace('_', ' ')}"
        return in_words(arguments[0]) + "".join(bounds(arguments[1:]))
    if origin in (Union, types.UnionType):
        return " or ".join(in_words(a) for a in arguments)
    if origin is Literal:
        return ", ".join(plain(a) for a in arguments)
    if origin in (list, tuple) and arguments:
        return f"list of {', '.join(in_words(a) for a in arguments if a is not Ellipsis)}"
    return WORDS.get(origin, "mapping" if is_dataclass(origin) else "path" if origin is Path else "anything")


def bounds(constraints: tuple[Any, ...]) -> Iterator[str]:
    begun = False
    for constraint in constraints:
        for each in constraint if isinstance(constraint, GroupedMetadata) else [constraint]:
            if type(each) in SIGNS:
                yield f"{',' * begun} {SIGNS[type(each)]} {getattr(each, type(each).__name__.lower()):,}"
                begun = True
            elif isinstance(each, MinLen) and each.min_length:
                yield ", not empty"


def escape(text: str) -> str:
    """Escape text for Markdown and reStructuredText, also in tables; code between backticks stays unchanged."""
    parts = re.split(r"(`[^`]*`)", text)
    escaped = [re.sub(r"([*_<\[\]$|])", r"\\\1", part) if i % 2 == 0 else part for i, part in enumerate(parts)]
    return "".join(escaped)


# ---- Python


def python_pages() -> Iterator[tuple[str, str]]:
    """Yield (package, page) for every package with public names."""
    packages: dict[str, list[str]] = {}
    for name in crosstrain.__all__:
        own, *parts = crosstrain.homes()[name].split(".")
        packages.setdefault(parts[0] if own == "crosstrain" else "verbs", []).append(name)
    packages["verbs"] += [verb for verb in verbs() if verb not in crosstrain.__all__ and python_function(verb)]
    for package, names in packages.items():
        of_verbs = "Functions of verbs, and base classes of plugins that belong to a verb."
        summary = of_verbs if package == "verbs" else inspect.getdoc(import_module(f"crosstrain.{package}"))
        parts = [f"# {package}\n\n{summary}\n\n```{{eval-rst}}\n.. currentmodule:: crosstrain\n"]
        parts += [autodoc(name, getattr(crosstrain, name)) for name in names]
        yield package, "\n".join(parts) + "\n```\n"


def autodoc(name: str, value: Any) -> str:
    """Return the directive that documents a public name."""
    if inspect.isclass(value):
        return f".. autoclass:: {name}\n   :members:\n"
    if inspect.isroutine(value):
        return f".. autofunction:: {name}\n"
    return f".. py:data:: {name}\n   :value: {value!r}\n"


def describe_fields(app: Sphinx, what: str, name: str, value: Any, options: Any, lines: list[str]) -> None:
    """Append the comments beside a class's fields to its docstring. Sphinx calls this for every docstring."""
    if what == "class":
        shown = getattr(value, "__dataclass_fields__", getattr(value, "_fields", ()))
        described = [(field, text) for field, text in meanings(value).items() if text and field in shown]
        lines += ["", *(f":param {field}: {escape(text)}" for field, text in described), ""]
