"""Bounds on option values, declared in the options' types and enforced by the checker.

An option's type is one of the names below, or has constraints from `annotated_types`, as in pydantic:
`Annotated[float, Interval(gt=0, le=1)]`, `Annotated[list[str], MinLen(1)]`. Without constraints, a number must be
finite, an int must fit into 64 bits, and a text must be Unicode without NUL, of at most `LONGEST_TEXT` characters.
"""

import math
import operator
from collections.abc import Collection
from dataclasses import dataclass
from typing import Annotated, Any

from annotated_types import Ge, Gt, Interval, MinLen

LONGEST_TEXT = 65_536  # characters
_LONGEST_PATH, _LONGEST_NAME = 4095, 255  # in bytes: the limits of file systems
LARGEST = 2**63 - 1


@dataclass(frozen=True)
class AllowInfinity:
    """Constraint: the number may be infinite."""


@dataclass(frozen=True)
class IsPath:
    """Constraint: the text is a valid path, not blank, and within the length limits of file systems."""


PositiveInt = Annotated[int, Ge(1)]
NonNegativeInt = Annotated[int, Ge(0)]
PositiveFloat = Annotated[float, Gt(0), Interval(ge=1e-12, le=10**12)]  # prevents underflow and overflow in fp32
NonNegativeFloat = Annotated[float, Interval(ge=0, le=10**12)]
Fraction = Annotated[float, Interval(ge=0, le=1)]
Text = Annotated[str, MinLen(1)]
FilePath = Annotated[str, IsPath()]

_COMPARISONS = {"ge": "of at least", "gt": "above", "le": "of at most", "lt": "below"}


def violated(value: Any, constraints: Collection[Any] = ()) -> tuple[str, str] | None:
    """Return the bound that `value` violates, as two texts for an error; None if it is within all bounds.

    The first text follows the expected type, the second follows the value, as in (" above 0", "").
    """
    limits = limits_of(constraints)
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isinf(value) and AllowInfinity() in constraints else ("", "")
    if type(value) is int and not limits.keys() & {"le", "lt"} and abs(value) > LARGEST:
        return "", ", which does not fit into 64 bits"
    if isinstance(value, str) and (reason := _bad_text(value, IsPath() in constraints)):
        return "", reason
    if any(isinstance(c, MinLen) and value is not None and len(value) < c.min_length for c in constraints):
        return " that is not empty", ""
    for name, limit in limits.items() if isinstance(value, (int, float)) else ():
        if not getattr(operator, name)(value, limit):
            return f" {_COMPARISONS[name]} {limit:,}", ""
    return None


def limits_of(constraints: Collection[Any]) -> dict[str, Any]:
    """Return bound -> limit for a number. The bounds are ge, gt, le and lt, as in `annotated_types`."""
    return {n: getattr(c, n) for c in constraints for n in _COMPARISONS if getattr(c, n, None) is not None}


def in_words(constraints: Collection[Any]) -> str:
    """Return constraints as words to put after a type, such as " of at least 1 and below 10"."""
    words = [f"{_COMPARISONS[name]} {limit:,}" for name, limit in limits_of(constraints).items()]
    words += ["that is not empty" for c in constraints if isinstance(c, MinLen)]
    return f" {' and '.join(words)}".replace(" and of ", " and ") if words else ""


def _bad_text(text: str, is_path: bool) -> str:
    try:
        encoded = text.encode()
    except UnicodeEncodeError:
        return ", which is not Unicode text"
    if "\0" in text:
        return ", which contains a NUL character"
    if is_path and (len(encoded) > _LONGEST_PATH or max(map(len, encoded.split(b"/"))) > _LONGEST_NAME):
        return f", which is too long: at most {_LONGEST_PATH} bytes, and {_LONGEST_NAME} bytes between slashes"
    if len(text) > LONGEST_TEXT:
        return f", which has {len(text):,} characters, more than {LONGEST_TEXT:,}"
    return ", which is blank" if is_path and not text.strip() else ""
