"""Rows of conversations from JSON files, Parquet files and folders of `datasets.save_to_disk`."""

import ast
import codecs
import json
import re
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from crosstrain.corpus import io
from crosstrain.utils.errors import DataError

Row = dict[str, Any]
_SUFFIXES = (".jsonl", ".ndjson", ".json", ".parquet")
_SPLIT = re.compile(r"(train|validation|valid|val|dev|test)(?![A-Za-z])")  # as the hub's files begin


def rows(paths: Iterable[str], ranked: bool = False) -> Iterator[tuple[Row | str, str]]:
    """Yield the rows of files and folders, and of `docstrings` (ranked: with a rejected answer), with their places.

    For a line that is no JSON object, the reason takes its place. Objects in the same place of a row have their keys in
    one order, by first appearance: a table has no other, so a file of lines and a table of the same rows agree. Raises
    DataError for a file that is missing or damaged as a whole, or of another kind.
    """
    order: dict[str, Any] = {}
    for row, place in chain.from_iterable(_given(path, ranked) for path in paths):
        try:
            row = _in_order(row, order)
        except RecursionError:
            row = "it is nested too deeply"
        yield row, place


def _given(item: str, ranked: bool) -> Iterator[tuple[Row | str, str]]:
    if item == "docstrings":
        return _docstrings(ranked)
    path = io.existing(item)
    if path.is_dir() and (path / "state.json").is_file():
        return ((row, f"{path}, row {number}") for number, row in enumerate(io.saved_dataset(path)))
    files = [file for file in io.files_below(path) if io.has_suffix(file, _SUFFIXES)] if path.is_dir() else [path]
    splits = {found[1] for file in files if (found := _SPLIT.match(file.name))}
    if (path / "dataset_dict.json").is_file() or len(splits) > 1:
        raise DataError(f"{path} holds several splits: name the files or the folder of one")
    if not files:
        raise io.nothing_in(path, " or ".join(_SUFFIXES))
    return chain.from_iterable(_parquet(file) if io.has_suffix(file, (".parquet",)) else _json(file) for file in files)


def _in_order(value: Any, order: dict[str, Any]) -> Any:
    """Return a JSON value with the keys of objects by first appearance; `order` holds them, with those below each."""
    if isinstance(value, list):
        return [_in_order(inner, order) for inner in value]
    if not isinstance(value, dict):
        return value
    found = {key: _in_order(inner, order.setdefault(key, (len(order), {}))[1]) for key, inner in value.items()}
    return {key: found[key] for key in sorted(found, key=lambda key: order[key][0])}


def _json(file: Path) -> Iterator[tuple[Row | str, str]]:
    with io.opened(file) as stream:
        data = stream.read().removeprefix(codecs.BOM_UTF8)
        if not (encoding := json.detect_encoding(data)).startswith("utf-8"):
            data = data.decode(encoding).encode()
    is_list = data.lstrip()[:1] == b"["
    whole = _parsed(data) if is_list or not io.has_suffix(file, (".jsonl", ".ndjson")) else None
    shared = whole if isinstance(whole, dict) else {}  # columns beside `data`
    entries = shared.pop("data", None) if isinstance(shared.get("data"), list) else whole
    if isinstance(entries, list):
        yield from ((_row(entry, shared), f"{file}, entry {number}") for number, entry in enumerate(entries))
    elif is_list:
        raise DataError(f"{file}: {whole}")
    else:
        lines = enumerate(data.split(b"\n"), 1)
        yield from ((_row(_parsed(line)), f"{file}:{number}") for number, line in lines if line.strip())


class _Reason(str):
    """A reason in place of a row."""


def _parsed(text: bytes) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        return _Reason(f"it is not JSON ({error})")


def _row(entry: Any, shared: Row | None = None) -> Row | str:
    if isinstance(entry, dict):
        return (shared or {}) | entry
    return entry if isinstance(entry, _Reason) else "it is no JSON object"


def _parquet(file: Path) -> Iterator[tuple[Row, str]]:
    with io.parquet_table(file) as table:
        entries = chain.from_iterable(batch.to_pylist() for batch in table.iter_batches(1024))
        yield from ((row, f"{file}, row {number}") for number, row in enumerate(entries))


def _docstrings(ranked: bool) -> Iterator[tuple[Row, str]]:
    """Questions about the functions and classes of Python's standard library, answered by their docstrings.

    The rejected answer is another one's. Nothing is imported.
    """
    found: list[tuple[str, str, str]] = []
    for file in sorted(Path(ast.__file__).parent.glob("[!_]*.py")):
        for node in ast.parse(file.read_bytes()).body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
                text = " ".join((ast.get_docstring(node) or "").partition("\n\n")[0].split())
                if text:
                    found.append((f"{file.stem}.{node.name}", text, f"{file}:{node.lineno}"))
    for (name, text, place), (_, other, _) in zip(found, [*found[len(found) // 2 :], *found], strict=False):
        asked = f"What does Python's {name} do?"
        yield {"prompt": asked} | ({"chosen": text, "rejected": other} if ranked else {"completion": text}), place
