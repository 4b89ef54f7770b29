"""Sizes and large numbers as people write them."""

from __future__ import annotations

import math
import re
from typing import Any

from crosstrain.utils.errors import UserError

_BINARY = {"KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}
_DECIMAL = {"": 1, "K": 1e3, "M": 1e6, "G": 1e9, "B": 1e9, "T": 1e12, "P": 1e15}


def read_bytes(text: str, what: str) -> int:
    """24GiB, 80GB, 512MiB or a number of bytes. Raises UserError, which names `what`, for anything else."""
    match = re.fullmatch(r"([\d.]+(?:e\d+)?)\s*([A-Za-z]*)", text.strip())
    unit = match[2].upper() if match else ""
    factor = _BINARY.get(unit) or _DECIMAL.get(unit.removesuffix("B") if unit != "B" else "")
    return int(_times(match[1] if match else "", factor, f"{what}: {text!r} is not a size such as 24GiB"))


def read_number(text: str, what: str) -> float:
    """2.5B, 150T, 3e11 or a plain number. Raises UserError, which names `what`, for anything else."""
    match = re.fullmatch(r"([\d.]+(?:e\d+)?)\s*([A-Za-z]*)", text.strip())
    factor = _DECIMAL.get(match[2].upper()) if match else None
    return _times(match[1] if match else "", factor, f"{what}: {text!r} is not a number such as 2.5B")


def _times(digits: str, factor: float | None, problem: str) -> float:
    try:
        value = float(digits) * (factor or 0)
    except ValueError:
        value = 0
    if not 0 < value < float("inf"):
        raise UserError(problem)
    return value


def show_bytes(size: float) -> str:
    """In GiB, or MiB where that is more telling."""
    return f"{size / 2**30:,.2f} GiB" if abs(size) >= 2**30 else f"{size / 2**20:,.1f} MiB"


def show_number(value: float) -> str:
    """With three digits and a letter: 3.54e8 is 354M."""
    for letter, factor in (("P", 1e15), ("T", 1e12), ("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if value >= factor:
            return f"{value / factor:.3g}{letter}"
    return f"{value:.3g}"


def finite(value: Any) -> Any:
    """`value`, or None for a number that JSON has no form for."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
