"""Completion in a shell, by argcomplete: eval "$(register-python-argcomplete crosstrain)".

Keys and values come from the JSON Schema beside the project file, or else from Crosstrain's own; nothing is imported.
"""

import argparse
import json
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import argcomplete

from crosstrain.config.load import preset_files
from crosstrain.config.registry import KINDS, registry
from crosstrain.config.yaml_text import Unreadable, parse
from crosstrain.utils import paths
from crosstrain.utils.errors import UserError


def complete(parser: argparse.ArgumentParser, verb: argparse.ArgumentParser) -> None:
    """Tell the shell the words that may follow, and exit."""
    completers = {
        "kind": lambda **_: KINDS,
        "name": lambda parsed_args, **_: [*registry.names(parsed_args.kind), *preset_files(parsed_args.kind)],
        "runners": lambda **_: [*registry.names("runner"), *preset_files("runner")],
        "options": lambda prefix, parsed_args, **_: _overrides(prefix, getattr(parsed_args, "cfg_path", None)),
    }
    for action in verb._actions:
        if action.choices is None and action.dest in completers:
            action.completer = completers[action.dest]  # type: ignore[attr-defined]
    argcomplete.autocomplete(parser)


def _overrides(prefix: str, cfg_path: str | None) -> list[str]:
    """Return the keys that may follow `prefix`, those of mappings with a dot; behind =, the values of the key."""
    schema, tree = paths.home() / "projects" / "crosstrain.schema.json", None
    with suppress(UserError, OSError, Unreadable):
        if cfg_path:
            file = paths.find(cfg_path)
            schema = beside if (beside := file.with_name(schema.name)).exists() else schema
            tree, _ = parse(file.read_text(encoding="utf-8"))
    root = json.loads(schema.read_bytes())

    def below(key: str) -> tuple[list[dict[str, Any]], Any]:
        """Return the schemas at `key` and its value in the project."""
        found, value = list(_applying(root, root, tree)), tree
        for name in filter(None, key.split(".")):
            value = value.get(name) if isinstance(value, dict) else None
            parts = [s.get("properties", {}).get(name, s.get("additionalProperties")) for s in found]
            found = [s for part in parts if isinstance(part, dict) for s in _applying(root, part, value)]
        return found, value

    def keys(section: str) -> list[str]:
        schemas, value = below(section)
        names = {name for s in schemas for name, part in s.get("properties", {}).items() if part is not True}
        names |= {*(value or ())} if any(isinstance(s.get("additionalProperties"), dict) for s in schemas) else set()
        found = []
        for key in (f"{section}{name}" for name in sorted(names)):
            found += [f"{key}="] if section else []
            found += [f"{key}."] if any("object" in s.get("type", ()) for s in below(key)[0]) else []
        return found

    key, assigned, _ = prefix.partition("=")
    if assigned:
        schemas = below(key)[0]
        values = [value for s in schemas for value in s.get("enum", ())]
        values += [True, False] if any("boolean" in s.get("type", ()) for s in schemas) else []
        return [f"{key}={value if isinstance(value, str) else json.dumps(value)}" for value in values]
    section = prefix[: prefix.rfind(".") + 1]
    found = [key for key in keys(section) if key.startswith(prefix)]
    return found + keys(found[0]) if len(found) == 1 and found[0].endswith(".") else found  # a shell ends a single word


def _applying(root: dict[str, Any], schema: dict[str, Any], value: Any) -> Iterator[dict[str, Any]]:
    """Yield the parts of a schema that apply to a place which has `value`."""
    yield schema
    parts = [*schema.get("anyOf", ()), *schema.get("allOf", ())]
    if "$ref" in schema:
        parts.append(root["definitions"][schema["$ref"].rpartition("/")[2]])
    if "if" in schema:
        ((naming, names),) = schema["if"]["properties"].items()
        name = value.get(naming) if isinstance(value, dict) else value
        default = name is None and "required" not in schema["if"]
        parts += [schema["then"]] if default or name in names["enum"] else []
    for part in parts:
        yield from _applying(root, part, value)
