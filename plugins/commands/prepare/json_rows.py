"""Read rows from JSON files: one object per line, a list of objects, or a list under a key of one object."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from crosstrain import DataError
from crosstrain.utils.files import unique_keys

from . import io

Row = dict[str, Any]
# A list of objects, an object over several lines, or perhaps an object that contains a list of objects.
_DOCUMENT = re.compile(rb'(\xef\xbb\xbf)?\s*((?P<list>\[\s*[{\]])|\{[ \t]*\r?\n|(?P<perhaps>\{[^\n]*?"\s*:\s*\[\s*\{))')
_EXPANSION = 4  # bytes of memory allowed per byte of a document


def parsed(text: bytes) -> Any:
    """Return a JSON value. Raises ValueError for any other text, and for an object with a repeated key."""
    try:
        return json.loads(text.decode("utf-8-sig"), object_pairs_hook=unique_keys)
    except RecursionError as error:
        raise ValueError(str(error)) from None


def entries(file: Path, is_row: Callable[[Row], bool]) -> list[Any] | None:
    """Return the entries of a file that is one JSON value; None for a file of lines.

    The value is a row, a list of rows, or an object with a list of rows (under `data`, or its only list). The object's
    other columns are added to each row. Raises DataError for a damaged list, or if the value or rows need too much
    memory.
    """
    with io.opened(file) as stream:
        data = stream.read(io.HEAD)
        found = _DOCUMENT.match(data)
        if not found:
            return None
        data += stream.read(io.MOST if found["perhaps"] else max(io.MOST, file.stat().st_size))
    try:
        with io.bounded(file, _EXPANSION * len(data)):
            content = parsed(data)
    except ValueError as error:
        if found["list"]:
            raise DataError(f"{file}: it is not JSON ({error}), or more than {io.MOST >> 20} MiB compressed") from None
        return None
    if isinstance(content, list):
        return content
    if is_row(content):
        return None if found["perhaps"] else [content]
    lists = [name for name, value in content.items() if isinstance(value, list)]
    if "data" not in lists and len(lists) != 1:
        return [content]
    rows = content.pop("data" if "data" in lists else lists[0])
    if len(json.dumps(content)) * len(rows) > io.MOST:
        raise DataError(f"{file}: the keys beside its list are too large to be repeated in each row: remove them")
    return [content | row if isinstance(row, dict) else row for row in rows]
