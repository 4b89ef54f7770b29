"""Conversations in the layouts that are published: OpenAI's messages, prompt and completion, ShareGPT, Alpaca."""

import ast
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from crosstrain.corpus import io
from crosstrain.data.chat_template import ChatError
from crosstrain.utils.errors import DataError

Row = dict[str, Any]
_SPEAKERS = {
    "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "model": "assistant",
    "chatgpt": "assistant", "bot": "assistant", "system": "system", "tool": "tool", "observation": "tool",
    "function_response": "tool", "developer": "developer",
}  # fmt: skip
_SUFFIXES = (".jsonl", ".ndjson", ".json", ".parquet")
_SPLIT = re.compile(r"(train|validation|valid|val|dev|test)(?![A-Za-z])")  # as the hub's files begin


def rows(paths: Iterable[str]) -> Iterator[tuple[Row | str, str]]:
    """Yield the rows of files and folders, and of `docstrings`, with their places.

    For a line that is no JSON object, the reason takes its place. Raises DataError for a file that is missing or
    damaged as a whole, or of another kind.
    """
    for item in paths:
        if item == "docstrings":
            yield from _docstrings()
            continue
        path = io.existing(item)
        if path.is_dir() and (path / "state.json").is_file():
            yield from ((_given(row), f"{path}, row {number}") for number, row in enumerate(io.saved_dataset(path)))
            continue
        files = [file for file in io.files_below(path) if io.has_suffix(file, _SUFFIXES)] if path.is_dir() else [path]
        splits = {found[1] for file in files if (found := _SPLIT.match(file.name))}
        if (path / "dataset_dict.json").is_file() or len(splits) > 1:
            raise DataError(f"{path} holds several splits: name the files or the folder of one")
        if not files:
            raise io.nothing_in(path, " or ".join(_SUFFIXES))
        for file in files:
            yield from _parquet(file) if io.has_suffix(file, (".parquet",)) else _json(file)


def _json(file: Path) -> Iterator[tuple[Row | str, str]]:
    with io.opened(file) as stream:
        data = stream.read()
    if data.lstrip()[:1] == b"[":
        try:
            found = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{file} is not JSON: {error}") from None
        entries = ((_object(entry), f"{file}, entry {number}") for number, entry in enumerate(found))
    else:
        lines = enumerate(data.removeprefix(b"\xef\xbb\xbf").split(b"\n"), 1)
        entries = ((_parsed(line), f"{file}:{number}") for number, line in lines if line.strip())
    yield from entries


def _parsed(line: bytes) -> Row | str:
    try:
        return _object(json.loads(line))
    except (ValueError, RecursionError) as error:
        return f"it is not JSON ({error})"


def _object(entry: Any) -> Row | str:
    return entry if isinstance(entry, dict) else "it is no JSON object"


def _parquet(file: Path) -> Iterator[tuple[Row, str]]:
    with io.parquet_table(file) as table:
        entries = chain.from_iterable(batch.to_pylist() for batch in table.iter_batches(1024))
        yield from ((_given(row), f"{file}, row {number}") for number, row in enumerate(entries))


def _docstrings() -> Iterator[tuple[Row, str]]:
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
        yield {"prompt": asked, "completion": text, "chosen": text, "rejected": other}, place


def _given(value: Any) -> Any:
    """A value without the nulls of a table, whose rows all have the keys of any."""
    if isinstance(value, dict):
        return {key: _given(inner) for key, inner in value.items() if inner is not None}
    return [_given(inner) for inner in value] if isinstance(value, list) else value


def preferences(row: Row) -> Iterator[tuple[list[Row], list[Any] | None, bool]]:
    """Yield a row's conversations, with their tools and whether the last answer is good: chosen and rejected, or one.

    Raises ChatError if the row has none of the layouts: chosen and rejected, whole or after a prompt or the turns of a
    conversation, or prompt, completion and label.
    """
    if isinstance(row.get("label"), bool):
        messages, tools = conversation(row)
        yield messages, tools, row["label"]
        return
    if row.get("chosen") is None or row.get("rejected") is None:
        raise ChatError("it has neither chosen and rejected, nor prompt, completion and label")
    before = row.get("prompt") or row.get("question") or row.get("conversations") or row.get("messages") or []
    asked = [_message(message) for message in _side(before, "user")] if before else []
    for key in ("chosen", "rejected"):
        answer = [row[key]] if isinstance(row[key], Mapping) else _side(row[key], "assistant")
        messages, tools = conversation({"messages": answer, "tools": row.get("tools")})
        if messages[0]["role"] == "assistant":  # otherwise it is a whole conversation, which a prompt repeats
            if not asked:
                raise ChatError("it has no prompt")
            messages = asked + messages
        if messages[-1]["role"] != "assistant":
            raise ChatError(f"the last turn of {key} is not the assistant's")
        yield messages, tools, key == "chosen"


def conversation(row: Row) -> tuple[list[Row], list[Any] | None]:
    """Return a row's messages as OpenAI writes them, and its tools. Raises ChatError if it has none of the layouts."""
    tools = row.get("tools")
    if isinstance(tools, str) and tools.strip():
        try:
            tools = json.loads(tools)
        except ValueError:
            raise ChatError("its tools are not JSON") from None
    return [_message(message) for message in _messages(row)], tools or None


def _messages(row: Row) -> list[Any]:
    if row.get("messages") is not None:
        return _turns(row, "messages")
    system = [{"role": "system", "content": row["system"]}] if row.get("system") else []
    if row.get("conversations") is not None:
        return system + _turns(row, "conversations")
    for asked, answered in (("prompt", "completion"), ("question", "answer"), ("prompt", "response")):
        if asked in row and answered in row:
            return _side(row[asked], "user") + _side(row[answered], "assistant")
    if "instruction" in row and "output" in row:
        asked = "\n\n".join(filter(None, (row["instruction"], row.get("input"))))
        before = system
        for exchange in row.get("history") or []:
            before += [
                {"role": role, "content": text} for role, text in zip(("user", "assistant"), exchange, strict=False)
            ]
        return [*before, {"role": "user", "content": asked}, {"role": "assistant", "content": row["output"]}]
    raise ChatError(
        f"it has {', '.join(map(str, row)) or 'no keys'}, and none of messages, conversations, prompt and completion, "
        f"question and answer, or instruction and output"
    )


def _turns(row: Row, key: str) -> list[Any]:
    if not isinstance(row[key], list) or not row[key]:
        raise ChatError(f"{key} is no list of turns")
    return row[key]


def _side(given: Any, role: str) -> list[Any]:
    return given if isinstance(given, list) else [{"role": role, "content": given}]


def _message(given: Any) -> Row:
    if not isinstance(given, Mapping):
        raise ChatError(f"a turn is {type(given).__name__}, not an object with role and content")
    message = {key: value for key, value in given.items() if value is not None}
    role = message.pop("role", None) or message.pop("from", None)
    content = message.pop("content", None)
    content = message.pop("value", None) if content is None else content
    if isinstance(content, list):
        if not all(isinstance(part, Mapping) and part.get("type", "text") == "text" for part in content):
            raise ChatError("a turn has parts that are not text")
        content = "".join(str(part.get("text", "")) for part in content)
    if role == "function_call":
        return {"role": "assistant", "content": None, "tool_calls": [_call(content)]}
    if not isinstance(role, str) or role not in _SPEAKERS:
        raise ChatError(f"a turn has the role {role!r}; known: {', '.join(sorted(set(_SPEAKERS.values())))}")
    if not isinstance(content, str) and (content is not None or not message.get("tool_calls")):
        raise ChatError(f"a turn of {role} has no text")
    return {"role": _SPEAKERS[role], "content": content} | message


def _call(text: Any) -> Row:
    try:
        return {"type": "function", "function": dict(json.loads(text))}
    except (TypeError, ValueError):
        raise ChatError("a function_call is not JSON") from None
