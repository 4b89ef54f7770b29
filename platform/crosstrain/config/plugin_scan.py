"""Discovery of the components in a plugin file, by its syntax tree: the file is not imported."""

from __future__ import annotations

import ast
import difflib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

KINDS = ("runner", "model", "dataset", "processor", "optimizer", "lr_scheduler", "reader", "tracker")


@dataclass(frozen=True)
class Entry:
    """A component that a file registers."""

    kind: str
    name: str
    file: Path
    line: int  # of the class or function
    summary: str  # first line of its docstring
    module: str  # name to import the file under


def scan_file(file: Path, module: str) -> tuple[list[Entry], str | None]:
    """Return the components that `file`, importable as `module`, registers, and its problem or None."""
    try:
        tree = ast.parse(file.read_bytes(), str(file))
    except SyntaxError as error:
        return [], f"SyntaxError: {error.msg}, line {error.lineno}"
    except (OSError, ValueError, RecursionError) as error:  # unreadable, null bytes, nested too deep
        return [], f"{type(error).__name__}: {error}".replace("\n", " ")
    entries, problem = [], None
    for definition in _definitions(tree.body):
        for decorator in definition.decorator_list:
            match decorator:
                case ast.Call(func=ast.Attribute(attr=attribute, value=owner)) if _is_registry(owner):
                    kind = attribute.removeprefix("register_")
                    match decorator.args:
                        case [ast.Constant(value=str(name))] if attribute == f"register_{kind}" and kind in KINDS:
                            summary = (ast.get_docstring(definition) or "").partition("\n")[0]
                            entries.append(Entry(kind, name, file, definition.lineno, summary, module))
                        case _:
                            problem = f"line {decorator.lineno}: {_complaint(attribute, kind)}"
    return entries, problem


def _complaint(attribute: str, kind: str) -> str:
    if kind in KINDS:
        return f"{attribute} takes one literal string, because the name is read without running the file"
    near = difflib.get_close_matches(attribute, [f"register_{k}" for k in KINDS], n=1)
    return f"registry has no {attribute}" + (f"; did you mean {near[0]}?" if near else "")


def _is_registry(node: ast.expr) -> bool:
    return (isinstance(node, ast.Name) and node.id == "registry") or (
        isinstance(node, ast.Attribute) and node.attr == "registry"
    )


def _definitions(body: list[ast.stmt]) -> Iterator[ast.ClassDef | ast.FunctionDef]:
    """Classes and functions that importing a module defines, also under `if`, `try` and `with`."""
    for statement in body:
        if isinstance(statement, (ast.ClassDef, ast.FunctionDef)):
            yield statement
            continue
        for field in ("body", "orelse", "finalbody"):
            yield from _definitions(getattr(statement, field, []))
        for handler in getattr(statement, "handlers", []):
            yield from _definitions(handler.body)
