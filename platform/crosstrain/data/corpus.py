"""Documents from files: text, JSON lines, Parquet, or the running Python's own standard library."""

from __future__ import annotations

import codecs
import json
import sysconfig
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from crosstrain.errors import DataError
from crosstrain.extras import require

STDLIB = "stdlib"
_CHUNK_BYTES = 1 << 22


def documents(inputs: str | list[str], text_key: str = "text", separator: str | None = None) -> Iterator[str]:
    """Every document with something but white space in it, input after input, in an order that never varies.

    inputs: each the word "stdlib" (the running Python's library, a document per .py file; always there, 30 MB), a file
    or a folder, searched recursively for what follows. `.txt`: one document, or as many as `separator` cuts it into.
    `.jsonl` and `.json`: one object per line, its text under `text_key`. `.parquet`: its text in column `text_key`.

    Raises DataError, saying where, for what is missing, damaged, not UTF-8, or holds no document at all.
    """
    for item in [inputs] if isinstance(inputs, str) else inputs:
        empty = True
        for text in _stdlib() if item == STDLIB else _files(item, text_key, separator):
            if text and not text.isspace():
                empty = False
                yield text
        if empty:
            raise DataError(f"{item} holds no document: everything in it is empty or white space")


def _files(item: str, text_key: str, separator: str | None) -> Iterator[str]:
    path = Path(item).expanduser()
    if not path.exists():
        raise DataError(f"the input {item} does not exist")
    for file in _find(path) if path.is_dir() else [path]:
        if file.suffix in (".jsonl", ".json"):
            yield from _json_lines(file, text_key)
        elif file.suffix == ".parquet":
            yield from _parquet(file, text_key)
        else:
            yield from _text(file, separator)


def _find(folder: Path) -> list[Path]:
    files = sorted(file for file in folder.rglob("*") if file.is_file() and not file.name.startswith("."))
    known = [file for file in files if file.suffix in (".txt", ".jsonl", ".json", ".parquet")]
    if not known:
        kinds = Counter(file.suffix or "no suffix" for file in files).most_common(3)
        found = ", ".join(f"{count} with {kind}" for kind, count in kinds) or "nothing"
        raise DataError(f"{folder} holds no .txt, .jsonl, .json or .parquet file (found: {found})")
    return known


def _text(file: Path, separator: str | None) -> Iterator[str]:
    if separator is None:
        yield "".join(_decoded(file))
        return
    rest = ""
    for chunk in _decoded(file):
        *whole, rest = (rest + chunk).split(separator)
        yield from whole
    yield rest


def _decoded(file: Path) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8")()
    with open(file, "rb") as stream:
        done = False
        while not done:
            chunk = stream.read(_CHUNK_BYTES)
            done = not chunk
            begin = stream.tell() - len(chunk) - len(decoder.getstate()[0])
            try:
                text = decoder.decode(chunk, final=done)
            except UnicodeDecodeError as error:
                raise DataError(f"{file} is not UTF-8 text: invalid at byte {begin + error.start}") from None
            yield text.removeprefix("\ufeff") if begin == 0 else text  # a byte order mark is no text


def _json_lines(file: Path, key: str) -> Iterator[str]:
    offset = 0
    with open(file, "rb") as stream:
        for number, line in enumerate(stream, 1):
            try:
                if not line.isspace():
                    yield _text_of(json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8")), key)
            except UnicodeDecodeError as error:
                where = offset + error.start
                raise DataError(f"{file}:{number} is not UTF-8 text: invalid at byte {where} of the file") from None
            except (ValueError, TypeError) as error:
                raise DataError(f"{file}:{number} is not a JSON object with text under {key!r}: {error}") from None
            offset += len(line)


def _text_of(record: object, key: str) -> str:
    if not isinstance(record, dict):
        raise TypeError(f"it is a {type(record).__name__}")
    if key not in record:
        raise ValueError(f"it has {', '.join(map(repr, record)) or 'no keys'}; set text_key")
    text = record[key]
    if not isinstance(text, str):
        raise TypeError(f"the value is a {type(text).__name__}")
    try:
        text.encode()
    except UnicodeEncodeError as error:  # JSON can spell half a surrogate pair, which is no character
        raise ValueError(f"character {error.start} of the text is {text[error.start]!r}") from None
    return text


def _parquet(file: Path, column: str) -> Iterator[str]:
    pyarrow, parquet = (require(module, f"reading {file}") for module in ("pyarrow", "pyarrow.parquet"))
    try:
        with parquet.ParquetFile(file) as table:
            names = table.schema_arrow.names
            if column not in names:
                raise DataError(f"{file} has no column {column!r}; it has {', '.join(names)}: set text_key")
            for batch in table.iter_batches(batch_size=1024, columns=[column]):
                for text in batch.column(0).to_pylist():
                    if text is not None and not isinstance(text, str):
                        raise DataError(f"column {column!r} of {file} holds {type(text).__name__}, not text")
                    yield text or ""
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{file} is not a readable Parquet file: {str(error).splitlines()[0]}") from None


def _stdlib() -> Iterator[str]:
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"site-packages", "dist-packages", "__pycache__"}
    for file in sorted(root.rglob("*.py")):
        if not skipped.intersection(file.relative_to(root).parts):
            # Python tests its own decoder with files that are deliberately not UTF-8.
            yield file.read_text(encoding="utf-8", errors="replace")
