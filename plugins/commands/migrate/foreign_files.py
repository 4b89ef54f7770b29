"""Read configurations of other programs: YAML, JSON, TOML, Python, command lines. Nothing is executed."""

import ast
import json
import re
import tomllib
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from crosstrain import ConfigError, explained, read_regular
from crosstrain.config.yaml_text import DEEPEST, LARGEST_TREE, Unreadable, parse

from .literals import UNKNOWN, value_of
from .shell_script import read_script

_LARGEST_FILE = 2**18  # bytes


def read_foreign(path: Path, calls: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Read a configuration in the format of its file suffix; a file with an unknown suffix is read as a shell script.

    The settings of a Python script are the arguments that it passes to the functions in `calls`, or its assignments if
    `calls` is empty. Raises ConfigError if the file cannot be read.
    """
    readers: dict[str, Callable[[str], Any]] = {
        ".json": json.loads,
        ".toml": tomllib.loads,
        ".py": partial(_arguments, calls=calls) if calls else _assignments,
        **dict.fromkeys((".yaml", ".yml"), lambda text: parse(text)[0]),
    }
    with explained(f"{path}: cannot be read"):
        text = read_regular(path, _LARGEST_FILE).decode("utf-8-sig")
        # tomllib needs a lot of memory for deeply nested keys.
        if path.suffix.lower() == ".toml" and re.search(rf"(\.\s*[\w\"'-]+\s*){{{DEEPEST}}}", text):
            raise Unreadable(f"expected at most {DEEPEST} levels")
        tree = readers.get(path.suffix.lower(), read_script)(text)
        _measure(tree)
    if not isinstance(tree, dict) or not tree:
        of = f"; a script's settings are the arguments of {', '.join([*calls][:4])}" if calls else ""
        raise ConfigError(f"{path}: no settings found{of * (path.suffix == '.py')}")
    return tree


def _measure(value: Any, depth: int = 0) -> int:
    """Return the number of values, plus one per 100 characters of text. Raises Unreadable if the tree is too large."""
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    size = 1 + (len(value) // 100 if isinstance(value, str) else 0)
    for part in parts:
        size += _measure(part, depth + 1)
        if size > LARGEST_TREE or depth > DEEPEST:
            raise Unreadable(f"expected at most {LARGEST_TREE:,} values in {DEEPEST} levels")
    return size


def _assignments(text: str) -> dict[str, Any]:
    """Read the top-level assignments of a Python module."""
    known = dict[str, Any]()
    for node in ast.parse(text).body:
        for target, value in _assigned(node):
            known[ast.unparse(target)] = value_of(value, known)
    return known


def _assigned(node: ast.AST) -> list[tuple[ast.expr, ast.expr]]:
    """Return the targets of an assignment with their values; other nodes have none."""
    match node:
        case ast.Assign(targets=[ast.Tuple(elts=names)], value=ast.Tuple(elts=values)):
            return [*zip(names, values, strict=False)]
        case ast.Assign(targets=targets, value=value):
            return [(target, value) for target in targets]
        case ast.AnnAssign(target=target, value=ast.expr() as value):
            return [(target, value)]
        case ast.AugAssign(target=target, op=kind, value=value):
            return [(target, ast.BinOp(target, kind, value))]
    return []


def _arguments(text: str, calls: Mapping[str, str]) -> dict[str, Any]:
    """Read the arguments that a Python script passes to the functions in `calls`; a computed argument is UNKNOWN.

    The setting "calls" contains the names of the calls that were found. A subclass of a class in `calls` counts as that
    class, and its public methods are settings, too.
    """
    found, known, tree = dict[str, Any](), _assignments(text), ast.parse(text)
    made = {name: name for name in calls}
    for own in (statement for statement in tree.body if isinstance(statement, ast.ClassDef)):
        for base in {ast.unparse(base).rpartition(".")[2] for base in own.bases} & made.keys():
            made[own.name] = made[base]
            found |= {
                each.name: own.name
                for each in own.body
                if isinstance(each, ast.FunctionDef) and not each.name.startswith("_")
            }
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and (name := made.get(ast.unparse(node.func).rpartition(".")[2])):
            for word, expression in _words(node, calls[name]).items():
                value = value_of(expression, known)
                if ast.unparse(expression) != "None" and (value != UNKNOWN or word not in found):
                    found[word] = value if found.get(word, UNKNOWN) in (UNKNOWN, value) else UNKNOWN
            found["calls"] = f"{found.get('calls', '')} {name}"
    configs = {
        ast.unparse(name)
        for node in tree.body
        for name, value in _assigned(node)
        if re.match(r"[\w.]+(Config|Arguments)\(", ast.unparse(value))
    }
    found |= {key.rpartition(".")[2]: value for key, value in known.items() if key.rpartition(".")[0] in configs}
    return found | (_data_files(tree, known) if "load_dataset" in calls else {})


def _words(call: ast.Call, first: str) -> dict[str, ast.expr]:
    """Return a dict of the arguments of a call; `first` names its first positional argument."""
    return dict(zip([first], call.args, strict=False)) | {
        word.arg or f"**{ast.unparse(word.value)}": word.value for word in call.keywords
    }


def _data_files(tree: ast.Module, known: Mapping[str, Any]) -> dict[str, Any]:
    """Return the files of the datasets passed to a trainer; UNKNOWN if they cannot be determined."""
    variables, given, loads = list[tuple[int, str, ast.expr]](), dict[str, ast.expr](), list[str]()
    for node in ast.walk(tree):
        variables += [(node.end_lineno, ast.unparse(name), value) for name, value in _assigned(node)]  # type: ignore[attr-defined]
        if isinstance(node, ast.Call):
            loads += [ast.unparse(node)] if ast.unparse(node.func).endswith("load_dataset") else []
            given |= {
                word.arg: word.value
                for word in node.keywords
                if word.arg in ("train_dataset", "eval_dataset") and ast.unparse(word.value) != "None"
            }
    if len({*loads}) < 2 and not given:
        return {}
    splits = list[ast.Call]()
    found = {name: _loaded(value, variables, known, splits) for name, value in given.items()}
    found["data_files"] = found.pop("train_dataset", UNKNOWN)
    same = len(splits) == 2 and splits[0] is splits[1]
    share = value_of(_words(splits[0], "test_size").get("test_size", ""), known) if same else None
    if isinstance(share, float) and 0 < share < 1:
        return {"data_files": found["data_files"], "validation_split_percentage": parse(f"{100 * share:.6g}")[0]}
    return found


def _loaded(
    node: ast.expr | None, variables: list[tuple[int, str, ast.expr]], known: Mapping[str, Any], splits: list[ast.Call]
) -> Any:
    """Trace an expression to the file of its load_dataset call, through variables, methods, subscripts and arguments.

    splits: calls of `train_test_split` on the way are appended to this list.
    """
    part: Any = None
    for _ in range(99):
        match node:
            case ast.Name(id=own):
                earlier = (each for each in variables if each[1] == own and each[0] < node.lineno)
                node = max(earlier, key=lambda each: each[0], default=(0, own, None))[2]
            case ast.Subscript(value=whole, slice=index):
                part, node = part or value_of(index, known), whole
            case ast.Call(func=function) if ast.unparse(function).endswith("load_dataset"):
                words = {name: value_of(expression, known) for name, expression in _words(node, "path").items()}
                files = words.get("data_files", words.get("data_dir", words.get("path", UNKNOWN)))
                return files.get(part or words.get("split"), UNKNOWN) if isinstance(files, dict) else files
            case ast.Call(func=ast.Attribute(value=whole, attr=method)):
                splits += [node] if method == "train_test_split" else []
                node = whole
            case ast.Call(args=[first, *_]):
                node = first
            case _:
                break
    return UNKNOWN
