"""The tables of docs/configuration.md against the options that they describe: every key, its type and its bounds."""

from __future__ import annotations

import re
import types
from dataclasses import fields, is_dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import pytest
from annotated_types import Ge, GroupedMetadata, Gt, Le, Lt

from conftest import ROOT
from crosstrain.config.bounds import IsPath
from crosstrain.config.registry import registry
from crosstrain.config.run_options import AmpOptions, BadStepOptions, CurriculumOptions, ProfileOptions, RunOptions
from crosstrain.config.schema import Component, defaults

PAGE = ROOT / "docs" / "configuration.md"
TABLES = {
    "## Every key of `run`": RunOptions,
    "`amp` as a mapping:": AmpOptions,
    "### Bad steps": RunOptions,
    "`on_bad_step` as a mapping:": BadStepOptions,
    "### Reporting, in steps": RunOptions,
    "`profile` as a mapping:": ProfileOptions,
    "`curriculum` as a mapping:": CurriculumOptions,
    "### Length": RunOptions,
    "### Checkpoints": RunOptions,
    "`runner: ddp`": ("runner", "ddp"),
    "`runner: fsdp`": ("runner", "fsdp"),
    "`optimizer: adamw`": ("optimizer", "adamw"),
    "`optimizer: sgd`": ("optimizer", "sgd"),
    "`name: text`": ("dataset", "text"),
}
IN_WORDS = {(ProfileOptions, "steps"): "[first, last], or a list of such"}  # no type says this
PLAIN = {bool: "true or false", int: "whole number", float: "number", str: "text", type(None): "null"}


def options_of(table: Any) -> Any:
    return registry.get(*table).Options if isinstance(table, tuple) else table


def rows() -> list[tuple[Any, str, str, str]]:
    """(table, key, type, default) of every row of the tables above."""
    table, found = None, []
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        table = next((t for start, t in TABLES.items() if line.startswith(start)), None if line[:3] == "## " else table)
        cells = [cell.strip() for cell in line.split(" | ")]
        if table is not None and line.startswith("| `"):
            for key in re.findall(r"`(\w+)`", cells[0]):
                found.append((table, key, cells[1], cells[2].rstrip(" |")))
    return found


def number(value: float) -> str:
    for base in (10, 2):
        power = next((p for p in range(4, 70) if base**p == value and value > 9999), None)
        if power:
            return f"{base}^{power}"
    return str(value)


def bounds(constraints: Any) -> str:
    """` > 0`, ` in [0, 1)`, or nothing."""
    flat = [c for group in constraints for c in (group if isinstance(group, GroupedMetadata) else (group,))]
    low = next((("[", c.ge) if isinstance(c, Ge) else ("(", c.gt) for c in flat if isinstance(c, (Ge, Gt))), None)
    high = next((("]", c.le) if isinstance(c, Le) else (")", c.lt) for c in flat if isinstance(c, (Le, Lt))), None)
    if low and high:
        return f" in {low[0]}{number(low[1])}, {number(high[1])}{high[0]}"
    return f" {'≥' if low[0] == '[' else '>'} {number(low[1])}" if low else ""


def in_words(hint: Any, plural: bool = False) -> str:
    origin, arguments = get_origin(hint) or hint, get_args(hint)
    if origin is Annotated:
        if arguments[0] is Component:
            return "components" if plural else "component"
        if IsPath() in arguments[1:]:
            return "paths" if plural else "path"
        return in_words(arguments[0], plural) + bounds(arguments[1:])
    if origin in (Union, types.UnionType):
        return " or ".join(in_words(a, plural) for a in arguments)
    if origin is Literal:
        return ", ".join(f"`{a}`" for a in arguments)
    if origin is list:
        return f"list of {in_words(arguments[0], plural=True)}"
    if origin is tuple:
        return f"{({2: 'two', 3: 'three'})[len(arguments)]} {in_words(arguments[0], plural=True)}"
    if is_dataclass(origin):
        head = getattr(origin, "shorthand", None)
        return f"{in_words(get_type_hints(origin)[head])}, or the mapping below" if head else "mapping"
    return PLAIN[origin] + ("s" if plural and origin in (int, float) else "")


ROWS = rows()


@pytest.mark.parametrize("row", ROWS, ids=[f"{i} {key}" for i, (_, key, _, _) in enumerate(ROWS)])
def test_a_documented_type_and_its_bounds_are_those_of_the_code(row: tuple[Any, str, str, str]) -> None:
    table, key, said, default = row
    cls = options_of(table)
    assert said == IN_WORDS.get((cls, key), in_words(get_type_hints(cls, include_extras=True)[key]))
    assert (default == "required") == (key not in defaults(cls))


@pytest.mark.parametrize("table", list(dict.fromkeys(TABLES.values())), ids=str)
def test_every_key_is_documented(table: Any) -> None:
    cls = options_of(table)
    assert {key for other, key, _, _ in ROWS if other == table} == {f.name for f in fields(cls) if f.init}
