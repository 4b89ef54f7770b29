"""Check and merge named numbers."""

import math
import sys
from typing import Any

from crosstrain.utils.errors import TrainingError


def is_number(value: Any) -> bool:
    """Return True for a parsed number that is finite when converted to a float."""
    return type(value) in (int, float) and abs(value) <= sys.float_info.max


def finite(value: Any) -> Any:
    """Replace numbers that JSON cannot represent with None, including those inside dictionaries and lists."""
    if isinstance(value, dict):
        return {key: finite(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def disjoint(numbers: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """Merge two mappings of name -> number. Raises TrainingError for a name that is in both."""
    if twice := numbers.keys() & more.keys():
        raise TrainingError(f"two values are called {min(twice)!r}; rename the one in the model, metric or callback")
    return numbers | more
