"""Plain data against typed dataclasses, type by type."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from annotated_types import Interval, MinLen
from hypothesis import given, settings
from hypothesis import strategies as st

from crosstrain.config.bounds import AllowInfinity, FilePath, PositiveFloat, PositiveInt, Text
from crosstrain.config.schema import Checker, to_plain
from crosstrain.utils.errors import ConfigError, ConfigErrors


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
NUMBERS = st.floats(allow_nan=False, allow_infinity=False)
INTEGERS = st.integers(-(2**63) + 1, 2**63 - 1)
TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\0"))


@settings(deadline=None)
@given(
    st.builds(
        Everything,
        flag=st.booleans(),
        number=INTEGERS,
        real=NUMBERS,
        text=TEXT,
        path=st.sampled_from([Path("a/b"), Path("/x")]),
        choice=st.sampled_from(["a", 1, True]),
        either=st.none() | INTEGERS | TEXT,
        items=st.lists(INTEGERS),
        loose=st.lists(st.booleans()),
        pair=st.tuples(INTEGERS, TEXT),
        several=st.lists(NUMBERS).map(tuple),
        mapping=st.dictionaries(TEXT, st.lists(INTEGERS)),
        inner=st.builds(Inner, INTEGERS),
        inners=st.lists(st.builds(Inner, INTEGERS)),
        maybe=st.none() | st.builds(Inner, INTEGERS),
        noted=INTEGERS,
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


# ---- bounds


@dataclass
class Bounded:
    """An option of every kind of bound."""

    count: PositiveInt | None = None
    rate: PositiveFloat = 1.0
    share: Annotated[float, Interval(ge=0, lt=1)] = 0.5
    level: Annotated[int, Interval(ge=1, le=9)] = 1
    limit: Annotated[float, AllowInfinity()] = 1.0
    file: FilePath = "f"
    folder: Path = Path("d")
    name: Text = "n"
    names: Annotated[list[Text], MinLen(1)] = field(default_factory=lambda: ["n"])
    sizes: dict[str, PositiveInt] = field(default_factory=dict)
    unbounded: int = 0
    real: float = 0.0
    options: dict[str, Any] = field(default_factory=dict)


@pytest.mark.parametrize(
    ("key", "value", "sentence"),
    [
        ("count", 0, "count: expected a whole number of at least 1, got 0"),
        ("rate", 0, "rate: expected a number above 0, got 0"),
        ("rate", -0.5, "rate: expected a number above 0, got -0.5"),
        ("rate", math.inf, "rate: expected a number, got inf"),
        ("rate", math.nan, "rate: expected a number, got nan"),
        ("rate", 5e-324, "rate: expected a number of at least 1e-12, got 5e-324"),
        ("rate", 10**400, "rate: expected a number, got a number of more than 100 digits"),
        ("share", 1, "share: expected a number below 1, got 1"),
        ("level", 10, "level: expected a whole number of at most 9, got 10"),
        ("level", 2**70, f"level: expected a whole number of at most 9, got {2**70}"),
        ("limit", math.nan, "limit: expected a number, got nan"),
        ("file", "", "file: expected text, got the text '', which is blank"),
        ("file", "a\0b", "file: expected text, got the text 'a\\x00b', which contains a NUL character"),
        ("file", "d/" + "x" * 256, f"file: expected text, got the text '{'d/' + 'x' * 78}'..., which is too long: "
         "at most 4095 bytes, and 255 bytes between slashes"),
        ("file", "x/" * 3000, f"file: expected text, got the text '{'x/' * 40}'..., which is too long: "
         "at most 4095 bytes, and 255 bytes between slashes"),
        ("folder", "", "folder: expected text, got the text '', which is blank"),
        ("name", "", "name: expected text that is not empty, got the text ''"),
        ("name", "\ud800", "name: expected text, got the text '\\ud800', which is not Unicode text"),
        ("name", "x" * 70_000, f"name: expected text, got the text '{'x' * 80}'..., which has 70,000 "
         "characters, more than 65,536"),
        ("names", [], "names: expected a list of text that is not empty, got a list of 0 values"),
        ("sizes", {"a": 0}, "sizes.a: expected a whole number of at least 1, got 0"),
        ("unbounded", 2**63, f"unbounded: expected a whole number, got {2**63}, which does not fit into 64 bits"),
        ("real", -math.inf, "real: expected a number, got -inf"),
        ("options", {"a": [{"b": "\0"}]}, "options.a.0.b: expected text, got the text '\\x00', "
         "which contains a NUL character"),
        ("options", {"a": b"x"}, "options.a: expected a number, text, true, false, null, a list or a mapping, "
         "got b'x'"),
    ],
)  # fmt: skip
def test_a_value_out_of_its_bounds_gets_one_sentence(key: str, value: Any, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        CHECK.dataclass(Bounded, {key: value}, ())
    assert str(caught.value) == f"f: {sentence}"


def test_a_value_at_its_bound_is_taken() -> None:
    given = {"count": 1, "share": 0, "level": 9, "limit": math.inf, "file": "x" * 255, "unbounded": 2**63 - 1}
    given |= {"options": {"a": [math.inf, None, True, "text"]}, "rate": 1e-12}
    checked = CHECK.dataclass(Bounded, given, ())
    assert {name: getattr(checked, name) for name in given} == given


def test_all_mistakes_are_told_at_once_and_a_required_key_that_is_misspelled_once() -> None:
    @dataclass
    class Required:
        path: str
        inner: Bounded = field(default_factory=Bounded)

    with pytest.raises(ConfigErrors) as caught:
        CHECK.dataclass(Required, {"pth": "x", "inner": {"count": 0, "sizes": {"a": 0, "b": 0}}, "x": 1}, ())
    assert [text.removeprefix("f: ") for text in caught.value.sentences] == [
        "inner.count: expected a whole number of at least 1, got 0",
        "inner.sizes.a: expected a whole number of at least 1, got 0",
        "inner.sizes.b: expected a whole number of at least 1, got 0",
        "pth: unknown key; did you mean path?",
        "x: unknown key; known: path, inner",
    ]
