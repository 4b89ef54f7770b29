"""Read rows of conversations from JSON files, Parquet files and folders written by `datasets.save_to_disk`."""

import ast
import re
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from crosstrain import DataError

from . import io

_TABLES = (".parquet", ".arrow")
_SUFFIXES = (".jsonl", ".jsonlines", ".jl", ".ndjson", ".json", *_TABLES)
# A word in the name of a file or a folder; the first three letters tell the splits apart.
_SPLIT = re.compile(
    r"(?<![a-z])(tra|val|dev|eva|tes)(?:in|ining|id|idation|elopment|l|luation|t|ting)?(?![a-z])", re.IGNORECASE
)


def rows(paths: Iterable[str], ranked: bool = False) -> Iterator[tuple[io.Row | str, str]]:
    """Yield (row, place) for the rows of files and folders, and for the built-in rows named `docstrings`.

    ranked: built-in rows also have a rejected answer. For a line that is not a JSON object, yield a reason instead of a
    row. Objects at the same place in different rows get the same order of keys, by first appearance. The columns of a
    table have a fixed order, so a file of JSON lines and a table with the same content yield equal rows. Raises
    DataError if a file is missing, damaged as a whole, or of an unknown kind.
    """
    order: dict[str, Any] = {}
    for row, place in chain.from_iterable(rows_as_given(path, ranked) for path in paths):
        try:
            row = _in_order(row, order)
        except RecursionError:
            row = "it is nested too deeply"
        yield row, place


def rows_as_given(item: str, ranked: bool = False) -> Iterator[tuple[io.Row | str, str]]:
    """Yield the rows of one file or folder as `rows` does, but keep each row's own order of keys."""
    if item == "docstrings":
        return _docstrings(ranked)
    path = io.existing(item)
    files = [file for file in io.files_below(path) if io.has_suffix(file, _SUFFIXES)] if path.is_dir() else [path]
    splits = {
        found[1].lower() for file in files for name in file.relative_to(path).parts if (found := _SPLIT.search(name))
    }
    if (path / "dataset_dict.json").is_file() or len(splits) > 1:
        raise DataError(f"{path} holds several splits: give the files or the folder of one split")
    if not files:
        raise io.nothing_in(path, " or ".join(_SUFFIXES))
    return chain.from_iterable(_table(file) if io.has_suffix(file, _TABLES) else _json(file) for file in files)


def _in_order(value: Any, order: dict[str, Any]) -> Any:
    """Return a JSON value with keys sorted by first appearance; order: key -> (position, order of nested keys)."""
    if isinstance(value, list):
        return [_in_order(inner, order) for inner in value]
    if not isinstance(value, dict):
        return value
    found = {key: _in_order(inner, order.setdefault(key, (len(order), {}))[1]) for key, inner in value.items()}
    return {key: found[key] for key in sorted(found, key=lambda key: order[key][0])}


def _json(file: Path) -> Iterator[tuple[io.Row | str, str]]:
    whole = io.entries(file, lambda row: not isinstance(row.get("data"), list))
    if whole is not None:
        for number, entry in enumerate(whole):
            yield entry if isinstance(entry, dict) else "it is not a JSON object", f"{file}, entry {number}"
        return
    with io.opened(file) as stream:
        for number, line in enumerate(io.pieces(stream, b"\n"), 1):
            if line.strip():
                yield _row(line), f"{file}:{number}"


def _row(line: bytes) -> io.Row | str:
    try:
        row = io.parsed(line)
    except ValueError as error:
        return f"it is not JSON ({error})"
    return row if isinstance(row, dict) else "it is not a JSON object"


def _table(file: Path) -> Iterator[tuple[io.Row, str]]:
    with io.table(file) as table:
        yield from ((row, f"{file}, row {number}") for number, row in enumerate(table.rows()))


def _docstrings(ranked: bool) -> Iterator[tuple[io.Row, str]]:
    """Yield questions about functions and classes of Python's standard library, with their docstrings as answers.

    The rejected answer is the docstring of a different function or class. Nothing is imported.
    """
    found: list[tuple[str, str, str]] = []
    for file in sorted(Path(ast.__file__).parent.glob("[!_]*.py")):
        for node in ast.parse(file.read_bytes()).body:
            if (
                isinstance(node, (ast.FunctionDef, ast.ClassDef))
                and not node.name.startswith("_")
                and (text := " ".join((ast.get_docstring(node) or "").partition("\n\n")[0].split()))
            ):
                found.append((f"{file.stem}.{node.name}", text, f"{file}:{node.lineno}"))
    for (name, text, place), (_, other, _) in zip(found, [*found[len(found) // 2 :], *found], strict=False):
        asked = f"What does Python's {name} do?"
        yield {"prompt": asked} | ({"chosen": text, "rejected": other} if ranked else {"completion": text}), place
