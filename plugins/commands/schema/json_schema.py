"""JSON Schema (draft 7) of project files, for editors. The schema accepts nearly the same values as the checker.

A schema cannot compare options with each other or follow an interpolation, and it accepts 1.0 as an integer.
"""

import json
import sys
import types
from collections.abc import Callable, Collection
from dataclasses import is_dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from crosstrain import Component, RunOptions, UserError, registry
from crosstrain.config import bounds
from crosstrain.config.describe import first_comment, options, summary
from crosstrain.config.load import model_types, preset_component, preset_files
from crosstrain.config.schema import options_class

Schema = dict[str, Any]

_INTERPOLATION = {"type": "string", "pattern": r"\$\{"}
_NULL: Schema = {"type": "null"}
_TYPES: dict[Any, Schema] = {
    int: {"type": "integer", "minimum": -bounds.LARGEST, "maximum": bounds.LARGEST},
    float: {"type": "number", "minimum": -sys.float_info.max, "maximum": sys.float_info.max},
    **{bool: {"type": "boolean"}, str: {"type": "string"}, type(None): _NULL},
    **{Any: {}, object: {}, Path: {"type": "string", "pattern": r"\S"}},
    **{list: {"type": "array"}, tuple: {"type": "array"}, dict: {"type": "object"}},
}
_KEYWORDS = {"ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum", "lt": "exclusiveMaximum"}


def project_schema() -> Schema:
    """Import every registered component, and return the schema of project files with these components."""
    found = _Definitions()
    sections = {
        "model": found.choice("model", "arch"),
        "datasets": {"type": "object", "minProperties": 1, "additionalProperties": found.component("dataset")},
        "run": found.options(RunOptions),
    }
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        **_mapping(sections, list(sections)),
        "definitions": dict(sorted(found.items())),
    }


class _Definitions(dict[str, Schema]):
    """Schemas of components and their options, by kind and name; each is created when it is first referenced."""

    def _refer(self, name: str, make: Callable[[], Schema]) -> Schema:
        if name not in self:
            self[name] = {}  # the schema may refer to itself
            self[name] = make()
        return {"$ref": f"#/definitions/{name}"}

    def component(self, kind: str, default: str | None = None) -> Schema:
        """Return a reference to the schema of a component, given as a name, or as a mapping of name and options.

        With a `default`, the mapping may omit the name.
        """

        def make() -> Schema:
            mapping = self.choice(kind, "name", default)
            needy = {n for n in _names(kind) if "required" in self[f"{kind}.{preset_component(kind, n)}"]}
            return {"anyOf": [_enum(kind, needy), _INTERPOLATION, mapping]}

        return self._refer(f"{kind}.default.{default}" if default else kind, make)

    def choice(self, kind: str, naming: str, default: str | None = None) -> Schema:
        """Return the schema of a mapping: a component's name under the key `naming`, and the component's options."""
        rules = []
        for name in registry.names(kind):
            stands = [name, *(p for p in preset_files(kind) if p != name and preset_component(kind, p) == name)]
            where = {"properties": {naming: {"enum": stands}}} | ({} if default in stands else {"required": [naming]})
            rules.append({"if": where, "then": self._refer(f"{kind}.{name}", partial(self._of_component, kind, name))})
        schema = {"type": "object", "properties": {naming: {"anyOf": [_enum(kind), _INTERPOLATION]}}, "allOf": rules}
        return schema if default else schema | {"required": [naming]}

    def _of_component(self, kind: str, name: str) -> Schema:
        try:
            component = registry.get(kind, name)
        except UserError as error:  # a package is not installed, or the plugin is broken
            return {"description": str(error)}
        schema = self.options(options_class(kind, component))
        schema["properties"]["name"] = True
        if kind == "dataset":
            schema["properties"]["sample_ratio"] = self.value(bounds.PositiveFloat | None) | {
                "description": "relative share of the samples, if the project has several datasets"
            }
        if kind == "model":  # the section `model` has the component's name under `arch`
            schema["properties"] |= {
                "arch": True,
                "model_type": self.value(Literal[(None, *model_types(name))]),
                "adapter": self.value(Annotated[Component, "adapter"] | None),
            }
        return schema | {"description": summary(component)}

    def options(self, cls: Any) -> Schema:
        """Return the schema of a mapping that becomes an instance of `cls`."""
        properties, known = {}, list(options(cls))
        for option in known:
            about, schema = f"{option.meaning}\n\n{option.type}", self.value(option.hint, option.default)
            if not option.required and not is_dataclass(option.hint):
                about += f"; default: {json.dumps(option.default)}"
                schema = {"default": option.default, **schema}
            properties[option.name] = {"description": about, **schema}
        return _mapping(properties, [option.name for option in known if option.required])

    def value(self, hint: Any, default: Any = None) -> Schema:
        """Return a schema that accepts values of type `hint`, and interpolations."""
        alternatives = self._alternatives(hint, default)
        return {} if {} in alternatives else {"anyOf": [*alternatives, _INTERPOLATION]}

    def _alternatives(self, hint: Any, default: Any = None) -> list[Schema]:
        origin, arguments = get_origin(hint) or hint, get_args(hint)
        if origin is Annotated and arguments[0] is Component:
            return [self.component(arguments[1], default["name"] if isinstance(default, dict) else default)]
        if origin is Annotated:
            return [_bounded(schema, arguments[1:]) for schema in self._alternatives(arguments[0], default)]
        if origin in (Union, types.UnionType):
            first, *rest = (schema for member in arguments for schema in self._alternatives(member, default))
            if rest == [_NULL] and "type" in first:  # editors show one alternative better than two
                return [first | {"type": [first["type"], "null"]}]
            return [first, *rest]
        if is_dataclass(origin):
            head = getattr(origin, "shorthand", None)
            switch = [{"type": "boolean"}] if hasattr(origin, "switches") else []
            short = self._alternatives(get_type_hints(origin)[head]) if head else []
            return [*switch, *short, self.options(origin)]
        if origin is Literal:
            return [{"enum": list(arguments)}]
        schema = dict(_TYPES[origin])
        if origin is dict and arguments:
            schema |= {"propertyNames": self.value(arguments[0]), "additionalProperties": self.value(arguments[1])}
        elif origin is tuple and arguments[-1] is not Ellipsis:
            length, items = len(arguments), [self.value(item) for item in arguments]
            schema |= {"items": items, "minItems": length, "maxItems": length}
        elif arguments:
            schema["items"] = self.value(arguments[0])
        return [schema]


def _names(kind: str) -> dict[str, str]:
    """Return the names of components and presets, each with its summary line."""
    return {entry.name: entry.summary for entry in registry.entries(kind)} | {
        name: first_comment(file) for name, file in preset_files(kind).items()
    }


def _enum(kind: str, without: Collection[str] = ()) -> Schema:
    about = {name: text for name, text in sorted(_names(kind).items()) if name not in without}
    return {"enum": [*about], "markdownEnumDescriptions": [*about.values()]} if about else _INTERPOLATION


def _mapping(properties: Schema, required: list[str]) -> Schema:
    schema = {"type": "object", "properties": properties, "additionalProperties": False}
    return schema | {"required": required} if required else schema


def _bounded(schema: Schema, constraints: Collection[Any]) -> Schema:
    if bounds.AllowInfinity() in constraints:
        schema = {word: value for word, value in schema.items() if word not in ("minimum", "maximum")}
    if "minimum" in schema or bounds.AllowInfinity() in constraints:
        schema |= {_KEYWORDS[name]: limit for name, limit in bounds.limits_of(constraints).items()}
    for constraint in constraints:
        if isinstance(constraint, bounds.IsPath):
            schema["pattern"] = r"\S"
        if (least := getattr(constraint, "min_length", None)) is not None:
            schema["minItems" if schema["type"] == "array" else "minLength"] = least
    return schema
