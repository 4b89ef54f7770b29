"""Readers of other programs' configurations: YAML, JSON, TOML, Python's assignments, command lines; nothing is run."""

from __future__ import annotations

import ast
import json
import re
import shlex
import tomllib
from collections.abc import Callable, Mapping
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from typing import Any

from crosstrain.config.yaml_text import Unreadable, parse
from crosstrain.utils.errors import ConfigError, explained
from crosstrain.utils.files import read_regular
from crosstrain.utils.optional_deps import require

_LARGEST_FILE = 2**18  # bytes
_LONGEST = 2**16  # characters of a shell's variable, which others may hold many times
UNKNOWN = "???"  # a value that only a run of the program would know, and OmegaConf's for one that has to be given


def read_foreign(path: Path) -> dict[str, Any]:
    """Read a configuration in the format of its name's ending; any other is a command, or a script with one.

    Raises ConfigError for a file that cannot be read.
    """
    readers: dict[str, Callable[[str], Any]] = {".json": json.loads, ".toml": tomllib.loads, ".py": _assignments}
    readers |= dict.fromkeys((".yaml", ".yml"), lambda text: parse(text)[0])
    with explained(f"{path}: cannot be read"):
        tree = readers.get(path.suffix.lower(), _command_line)(read_regular(path, _LARGEST_FILE).decode("utf-8-sig"))
    if not isinstance(tree, dict) or not tree:
        raise ConfigError(f"{path}: there are no settings in it")
    return tree


def _value(expression: str, known: Mapping[str, Any]) -> Any:
    """Return the value of literals, arithmetic and known names; Jinja knows no others, and a power may be endless."""
    with suppress(Exception):
        found = require("jinja2.sandbox", "crosstrain migrate").SandboxedEnvironment().compile_expression(expression)
        return UNKNOWN if "**" in expression or (value := found(**known)) is None else value
    return UNKNOWN


def _assignments(text: str) -> dict[str, Any]:
    """Read the assignments at the top of a Python module."""
    known: dict[str, Any] = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            known[node.targets[0].id] = _value(ast.unparse(node.value), known)
    return known


def _command_line(text: str) -> dict[str, Any]:
    """Read the options of a command, behind the program's name, NAME.py, if it is there, and the launcher's ranks.

    Of a script's variables and arrays the last assignment counts, whatever its branch.
    """
    words, variables, command = shlex.shlex(text.replace("\\\n", " "), posix=True), dict[str, str](), list[str]()
    words.whitespace_split = True
    for word in words:
        if assigned := re.match(r"(\w+)(\+?)=(.*)", word, re.DOTALL):
            name, more, value = assigned.groups()
            while value.count("(") > value.count(")") and (word := words.get_token() or ""):
                value += f" {word}"
            value = _expanded(value[1:-1] if value.startswith("(") else value, variables)
            variables[name] = (f"{variables.get(name, '')} {value}" if more else value)[:_LONGEST]
        else:
            command += _expanded(word, variables).split()
    programs = [i for i, word in enumerate(command[:-1]) if word.endswith(".py") and command[i + 1].startswith("--")]
    options, values = dict[str, list[str]](), list[str]()
    start = programs[-1] if programs else 0
    ranks = re.findall(r"--(nproc[-_]per[-_]node|nnodes|num_processes)[= ](\d{1,6})(?!\S)", " ".join(command[:start]))
    for word in takewhile(lambda word: not re.match(r"[;|&>]|2>", word), command[start:]):
        if option := re.match(r"--([\w-]+)(?:=(.*))?$", word):
            values = options[option[1].replace("-", "_").lower()] = [option[2]] if option[2] else []
        else:
            values.append(word)
    launched = {name.replace("-", "_"): int(number) for name, number in ranks}
    return launched | {name: _parsed(values) for name, values in options.items()}


def _expanded(text: str, variables: Mapping[str, str]) -> str:
    """Put values in the place of a shell's variables and arithmetic."""

    def variable(found: re.Match[str]) -> str:
        return variables.get(found[1] or found[2]) or (UNKNOWN if found[3] is None else found[3])

    text = re.sub(r"\$(\w+)|\$\{(\w+)(?:\[[@*]])?(?::?[-=]([^{}]*))?}", variable, text)
    numbers = {name: int(value) for name, value in variables.items() if re.fullmatch(r"\d{1,18}", value)}
    text = re.sub(r"\$\(\(([^()]*)\)\)", lambda found: str(_value(found[1].replace("/", "//"), numbers)), text)
    return re.sub(r"\$[@*]|\$\{[@*]}", "", text)


def _parsed(words: list[str]) -> Any:
    """Return an option's value: of no word true, of several a list."""
    values: list[Any] = [word.strip("'\"") for word in words]
    for i, word in enumerate(values):
        with suppress(Unreadable):
            values[i] = parse(word)[0]
    return UNKNOWN if UNKNOWN in "".join(words) else values if len(values) > 1 else values[0] if values else True
