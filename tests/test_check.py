"""Plain data against typed dataclasses, type by type."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crosstrain.check import Checker, to_plain
from crosstrain.errors import ConfigError


@dataclass
class Inner:
    value: int = 0


@dataclass
class Everything:
    """One field of every type that the checker understands."""

    flag: bool = False
    number: int = 0
    real: float = 0.0
    text: str = ""
    nothing: None = None
    anything: Any = None
    path: Path = Path(".")
    choice: Literal["a", 1, True] = "a"
    either: int | str | None = None
    items: list[int] = field(default_factory=list)
    loose: list = field(default_factory=list)
    pair: tuple[int, str] = (0, "")
    several: tuple[float, ...] = ()
    mapping: dict[str, list[int]] = field(default_factory=dict)
    inner: Inner = field(default_factory=Inner)
    inners: list[Inner] = field(default_factory=list)
    maybe: Inner | None = None
    noted: Annotated[int, "a note"] = 0


CHECK = Checker(lambda key: f"f: {'.'.join(key)}")
NUMBERS = st.floats(allow_nan=False)


@settings(deadline=None)
@given(
    st.builds(
        Everything,
        flag=st.booleans(),
        number=st.integers(),
        real=NUMBERS,
        text=st.text(),
        path=st.sampled_from([Path("a/b"), Path("/x")]),
        choice=st.sampled_from(["a", 1, True]),
        either=st.none() | st.integers() | st.text(),
        items=st.lists(st.integers()),
        loose=st.lists(st.booleans()),
        pair=st.tuples(st.integers(), st.text()),
        several=st.lists(NUMBERS).map(tuple),
        mapping=st.dictionaries(st.text(), st.lists(st.integers())),
        inner=st.builds(Inner, st.integers()),
        inners=st.lists(st.builds(Inner, st.integers())),
        maybe=st.none() | st.builds(Inner, st.integers()),
        noted=st.integers(),
    )
)
def test_typed_values_survive_being_made_plain(value: Everything) -> None:
    assert CHECK.dataclass(Everything, to_plain(value), ()) == value


@pytest.mark.parametrize(
    ("key", "value", "sentence"),
    [
        ("flag", 1, "flag: expected true or false, got 1"),
        ("number", True, "number: expected a whole number, got true"),
        ("number", 1.0, "number: expected a whole number, got 1.0"),
        ("real", "1", "real: expected a number, got the text '1'"),
        ("text", None, "text: expected text, got null"),
        ("nothing", 0, "nothing: expected null, got 0"),
        ("choice", False, "choice: expected one of a, 1, True, got false"),
        ("either", 1.5, "either: expected a whole number or text or null, got 1.5"),
        ("items", [1, "x"], "items.1: expected a whole number, got the text 'x'"),
        ("loose", {}, "loose: expected a list, got an empty mapping"),
        ("pair", [1], "pair: expected a list of 2 values (a whole number, text), got 1 values"),
        ("several", [1, None], "several.1: expected a number, got null"),
        ("mapping", {"a": 1}, "mapping.a: expected a list of a whole number, got 1"),
        ("inner", None, "inner: expected a mapping, got null"),
        ("inners", [{"vlue": 1}], "inners.0.vlue: unknown key; did you mean inners.0.value?"),
        ("maybe", {"value": "x"}, "maybe.value: expected a whole number, got the text 'x'"),
        ("maybe", 3, "maybe: expected a mapping or null, got 3"),
        ("noted", "x", "noted: expected a whole number, got the text 'x'"),
    ],
)
def test_a_value_of_the_wrong_type_gets_one_sentence(key: str, value: Any, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        CHECK.dataclass(Everything, {key: value}, ())
    assert str(caught.value) == f"f: {sentence}"
