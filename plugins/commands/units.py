"""Parse and format sizes, large numbers and times."""

import math
import re

from crosstrain import UserError

_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "B": 3, "T": 4, "P": 5}


def read_bytes(text: str, what: str) -> int:
    """Parse a size of at least 1,000 bytes, such as 24GiB or 80GB. Raises UserError for other texts.

    what: name of the value in the error.
    """
    problem = f"{what}: {text!r} is not a size such as 5GB or 24GiB"
    size = int(_read(r"(\d+\.?\d*|\.\d+)\s*([KMGTP]?)(I?)B?", text, problem))
    if size < 1000:  # too small: the unit is probably missing
        raise UserError(problem)
    return size


def read_number(text: str, what: str) -> float:
    """Parse 2.5B, 150T, 3e11 or a plain number. Raises UserError for other texts.

    what: name of the value in the error.
    """
    return _read(
        r"((?:\d+\.?\d*|\.\d+)(?:E\d+)?)\s*([KMGBTP]?)()", text, f"{what}: {text!r} is not a number such as 2.5B"
    )


def _read(pattern: str, text: str, problem: str) -> float:
    match = re.fullmatch(pattern, text.strip().upper(), re.ASCII)
    value = float(match[1]) * (1024 if match[3] else 1000) ** _POWERS[match[2]] if match else 0.0
    if not 0 < value < math.inf:
        raise UserError(problem)
    return value


def show_bytes(size: float) -> str:
    """Format a size in GiB, or in MiB below one GiB."""
    return f"{size / 2**30:,.2f} GiB" if abs(size) >= 2**30 else f"{size / 2**20:,.1f} MiB"


def show_number(value: float) -> str:
    """Format a number with three digits and a letter, such as 354M for 3.54e8."""
    for letter, factor in (("P", 1e15), ("T", 1e12), ("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if value >= factor:
            return f"{value / factor:.3g}{letter}"
    return f"{value:.3g}"


def show_seconds(seconds: float) -> str:
    """Format a time in whole days, hours, minutes or seconds: in the largest unit that gives at least 2."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds // length:.0f} {unit}"
    return f"{seconds:.0f} s"
