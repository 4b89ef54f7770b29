"""The tables of docs/configuration.md against the options that they describe: every key, its type and its bounds."""

from __future__ import annotations

import types
from dataclasses import fields, is_dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import pytest
from annotated_types import Ge, GroupedMetadata, Gt, Le, Lt

from crosstrain.config.bounds import IsPath
from crosstrain.config.registry import registry
from crosstrain.config.run_options import ProfileOptions
from crosstrain.config.schema import Component, defaults
from fixtures_config import ROWS, TABLES

IN_WORDS = {(ProfileOptions, "steps"): "[first, last]"}  # no type says this
PLAIN = {bool: "true or false", int: "whole number", float: "number", str: "text", type(None): "null"}


def options_of(table: Any) -> Any:
    return registry.get(*table).Options if isinstance(table, tuple) else table


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
