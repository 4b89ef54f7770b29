"""Descriptions of components and their options, for lists, editors and documentation."""

import ast
import inspect
import io
import re
import textwrap
import tokenize
from collections import ChainMap
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache
from itertools import takewhile, zip_longest
from pathlib import Path
from typing import Any, get_args, get_type_hints

from crosstrain.config.schema import Component, defaults, describe

_IN_YAML = {"None": "null", "True": "true", "False": "false"}


@dataclass(frozen=True)
class Option:
    """An option of a component, or of a section of a project file."""

    name: str
    hint: Any  # type of the option
    required: bool
    default: Any  # default as a YAML value
    meaning: str  # "" if the option is not documented

    @property
    def type(self) -> str:
        """The type and bounds of the option, in words."""
        return describe(self.hint, limits=True)

    @property
    def inner(self) -> Any:
        """The dataclass of nested options, or None."""
        return next(
            (
                hint
                for hint in (self.hint, *get_args(self.hint))
                if isinstance(hint, type) and is_dataclass(hint) and hint is not Component
            ),
            None,
        )


def options(cls: Any) -> Iterator[Option]:
    """Yield the options that a dataclass declares."""
    hints, texts, plain = get_type_hints(cls, include_extras=True), meanings(cls), defaults(cls)
    for name in (f.name for f in fields(cls) if f.init):
        default = plain.get(name)
        default = default["name"] if isinstance(default, dict) and [*default] == ["name"] else default
        option = Option(name, hints[name], name not in plain, default, texts.get(name, ""))
        text = option.meaning or (summary(option.inner) if option.inner else "")
        yield replace(option, meaning=re.sub(r"\b(None|True|False)\b", lambda found: _IN_YAML[found[0]], text))


def summary(component: object) -> str:
    """Return the first line of the docstring of a class or function."""
    return inspect.cleandoc(getattr(component, "__doc__", None) or "").partition("\n")[0]


def first_comment(file: Path) -> str:
    """Return the description of a preset: the comment in the first line of its file."""
    return file.read_text(encoding="utf-8").partition("\n")[0].lstrip("# ")


def meanings(cls: type) -> dict[str, str]:
    """Return field name -> meaning for a dataclass or a pydantic model, including its bases' fields.

    A meaning is the docstring below the field, or else the comment on the field's lines, or else the comment directly
    above. Fields made by `make_dataclass` have no source; their meaning is in `field(metadata={"meaning": ...})`.
    """
    return dict(ChainMap(*map(_own_meanings, cls.__mro__[:-1])))


@cache
def _own_meanings(cls: type) -> dict[str, str]:
    try:
        return _in_source(textwrap.dedent(inspect.getsource(cls)))
    except (OSError, TypeError):  # the class is a builtin, or was created at run time
        made = cls.__dict__.get("__dataclass_fields__", {}).values()
        return {f.name: text for f in made if (text := f.metadata.get("meaning"))}


def _in_source(source: str) -> dict[str, str]:
    """Return field name -> docstring or comment for the class that `source` defines."""
    lines, found = source.splitlines(), {}
    comments = {
        token.start[0]: token.string.lstrip("# ")
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    alone = {n for n in comments if lines[n - 1].lstrip().startswith("#")}
    body = getattr(ast.parse(source).body[0], "body", [])
    for field, below in zip_longest(body, body[1:]):
        match field, below:
            case ast.AnnAssign(), ast.Expr(value=ast.Constant(value=str(text))):
                found[ast.unparse(field.target)] = " ".join(text.split())
            case ast.AnnAssign(lineno=first, end_lineno=int(last)), _:
                beside = [n for n in range(first, last + 1) if n in comments]
                above = [*takewhile(alone.__contains__, range(first - 1, 0, -1))][::-1]
                if beside or above:
                    found[ast.unparse(field.target)] = " ".join(comments[n] for n in beside or above)
    return found
