"""Sources of configuration: read, merge and resolve them, and keep the origin of every key."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any, get_type_hints

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from crosstrain.config.run_options import RunOptions
from crosstrain.config.schema import Key, to_plain
from crosstrain.config.yaml_text import Unreadable, parse
from crosstrain.utils import paths
from crosstrain.utils.errors import ConfigError, ConfigErrors, first_line, nearest, sentence
from crosstrain.utils.files import read_regular
from crosstrain.utils.limited_process import LimitedProcess

OPTIONS = "--options"
_MISSING = "???"  # OmegaConf's marker for a value that the user must give
_LARGEST_FILE = 2**18  # bytes
_MEMORY = 2**28  # bytes; memory limit for resolving interpolations

_RUN = {("run", name): hint for name, hint in get_type_hints(RunOptions).items()}
# Key of a mapping -> key that is set if a string replaces the mapping: `amp: bf16` is short for `amp: {dtype: bf16}`.
_NAME_KEYS: dict[Key, str] = {
    ("model",): "arch",
    **{key: hint.shorthand for key, hint in _RUN.items() if hasattr(hint, "shorthand")},
}
# Key of an option -> values that true and false stand for.
_SWITCHES: dict[Key, dict[bool, str]] = {key: hint.switches for key, hint in _RUN.items() if hasattr(hint, "switches")}


def name_key(key: Key) -> str:
    """Return the key of the component's name in the mapping at `key`: `name`, or `arch` for the model."""
    return _NAME_KEYS.get(key, "name")


@dataclass
class Layer:
    """One source of configuration. `lines` maps the keys in `tree` to line numbers (None: no line number)."""

    label: str
    tree: dict[str, Any]
    lines: dict[Key, int | None] = field(default_factory=dict)


def where(layers: Sequence[Layer], key: Key) -> str:
    """Return `file:line: key` from the highest layer with `key`, or else from the nearest enclosing section.

    layers: lowest first. The key is shown as written: `run.runner`, not `run.runner.name`, for `runner: ddp`.
    """
    for layer in reversed(layers):
        if key in layer.lines:
            return _place(layer, key, key)
        if key[-1:] == (name_key(key[:-1]),) and isinstance(value_at(layer.tree, key[:-1]), str):
            return _place(layer, key[:-1], key[:-1])
    files = [layer for layer in reversed(layers) if layer.label != OPTIONS]
    for length in range(len(key) - 1, 0, -1):
        for layer in files:
            if key[:length] in layer.lines:
                return _place(layer, key[:length], key)
    return _place(files[0], (), key)


def read_yaml(path: Path, at: Key = ()) -> Layer:
    """Read the mapping in a YAML file and nest it under `at`. Raises ConfigError with the line of a mistake."""
    label = paths.show(path)
    try:
        tree, root = parse(read_regular(path, _LARGEST_FILE).decode("utf-8-sig"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(sentence(f"{label}: cannot be read: {getattr(error, 'strerror', None) or error}")) from error
    except Unreadable as error:
        place = f"{label}:{error.line}" if error.line else label
        raise ConfigError(sentence(f"{place}: {error}")) from error
    if root is None:
        raise ConfigError(f"{label}: the file is empty")
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError(f"{label}:{root.start_mark.line + 1}: expected a mapping of keys to values")
    return Layer(label, nested(at, tree), dict(_lines(root, at)))


def nested(key: Sequence[str], value: Any) -> Any:
    """Return a tree with `value` at `key`."""
    return reduce(lambda inner, name: {name: inner}, reversed(key), value)


# strings `a.b=value` with YAML values, or dotted key -> value
Overrides = Iterable[str | tuple[str, Any]] | Mapping[str, Any]


def read_options(options: Overrides) -> Layer:
    """Read overrides from the command line or from Python. If a key occurs repeatedly, the last value counts."""
    tree: dict[str, Any] = {}
    for key, value in pairs(options):
        tree = merge(tree, nested(_parts(key) or [key], to_plain(value)), names_replace=False)
    return plain_layer(OPTIONS, tree)


def _parts(key: str) -> list[str]:
    """Return the names in a key such as `a.b[0].c`."""
    return re.findall(r"[^.\[\]]+", key)


def pairs(options: Overrides) -> list[tuple[str, Any]]:
    """Return overrides as (dotted key, value)."""
    given = options.items() if isinstance(options, Mapping) else options
    return [_parse_option(option) if isinstance(option, str) else option for option in given]


def _parse_option(option: str) -> tuple[str, Any]:
    key, separator, text = option.partition("=")
    if not separator or not all(part.strip() for part in key.split(".")):
        raise ConfigError(f"{OPTIONS}: {option!r} is not of the form key=value, such as run.seed=1")
    try:
        return key, parse(text)[0]
    except Unreadable as error:
        raise ConfigError(sentence(f"{OPTIONS}: {key}: cannot parse the value: {error}")) from error


def plain_layer(label: str, tree: dict[str, Any]) -> Layer:
    """Return a layer without line numbers."""
    return Layer(label, tree, {key: None for key, _ in walk(tree)})


def merge(lower: Any, upper: Any, key: Key = (), *, names_replace: bool = True) -> Any:
    """Merge `upper` over `lower`, mapping by mapping.

    If one side has a string where the other has a component's mapping, the string is the component's name: `zero2`
    means {name: zero2}. If `upper` names a different component than `lower`, the options in `lower` are dropped.
    """
    naming = name_key(key)
    if isinstance(upper, bool):
        upper = _SWITCHES.get(key, {}).get(upper, upper)
    if isinstance(upper, str) and isinstance(lower, dict) and (naming in lower or not names_replace):
        upper = {naming: upper}
    if isinstance(lower, str) and isinstance(upper, dict):
        lower = {naming: lower}
    if isinstance(lower, list) and isinstance(upper, dict) and upper.keys() <= {str(i) for i in range(len(lower))}:
        return [
            merge(item, upper.get(str(i), item), (*key, str(i)), names_replace=names_replace)
            for i, item in enumerate(lower)
        ]
    if not (isinstance(lower, dict) and isinstance(upper, dict)):
        return upper
    old, new = lower.get(naming), upper.get(naming)
    named = isinstance(old, str) and old != _MISSING
    if names_replace and named and isinstance(new, str) and old != new and naming in ("name", "arch"):
        return upper
    both = {
        name: merge(value, upper[name], (*key, str(name)), names_replace=names_replace)
        for name, value in lower.items()
        if name in upper
    }
    return lower | upper | both


def escape(value: Any) -> Any:
    """Escape ${} in `value`, so that `resolve` returns it unchanged."""
    if isinstance(value, dict):
        return {name: escape(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [escape(item) for item in value]
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", value) if isinstance(value, str) else value


def named(tree: Any, key: Key) -> Any:
    """Return the name that `tree` contains for the component at `key`, or None."""
    value = value_at(tree, key)
    return value.get(name_key(key)) if isinstance(value, dict) else value


def resolve(tree: dict[str, Any], layers: Sequence[Layer], key: Key = ()) -> Any:
    """Return the value at `key`, by default the whole tree, with every ${interpolation} replaced by its value.

    Errors contain the file and line of the key, from `layers`. Nested interpolations can expand to very long text, so a
    process with limits on memory and time resolves all interpolations.
    """
    value = value_at(tree, key)
    if not re.search(r"\$\{|\?\?\?", str(value)):
        return value  # fast path: OmegaConf would copy the whole tree
    what = f"{layers[0].label}: resolving its interpolations"
    with closing(LimitedProcess(_resolve, what, memory=_MEMORY, seconds=5.0, advice="use fewer")) as process:
        return process((tree, layers, key))


def _resolve(given: tuple[dict[str, Any], Sequence[Layer], Key]) -> Any:
    tree, layers, key = given
    try:
        node: Any = reduce(getitem, key, OmegaConf.create(tree))
        return OmegaConf.to_container(node, resolve=True, throw_on_missing=True) if OmegaConf.is_config(node) else node
    except OmegaConfBaseException as error:
        raise _unresolved(error, layers, tree, key) from error


def walk(tree: Any, at: Key = ()) -> Iterator[tuple[Key, Any]]:
    """Yield (key, value) for everything in a tree, including its sections."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for name, value in items:
        yield (*at, str(name)), value
        yield from walk(value, (*at, str(name)))


def _unresolved(error: OmegaConfBaseException, layers: Sequence[Layer], tree: dict[str, Any], at: Key) -> ConfigError:
    key = tuple(_parts(str(error.full_key or "")))
    reason = first_line(error)
    if "Missing mandatory value" in reason:
        reason = "required, but still ???; give it a value, or null if that is its default"
        left = [each for each, value in walk(tree) if value == _MISSING and each[: len(at)] == at]
        return ConfigErrors(ConfigError(sentence(f"{where(layers, each)}: {reason}")) for each in left or [key])
    elif target := re.search(r"Interpolation key '(.+?)' not found", reason):
        near = nearest(target[1], [".".join(key) for key, _ in walk(tree)])
        reason = f"${{{target[1]}}} refers to an unknown key" + (f"; did you mean ${{{near[0]}}}?" if near else "")
    else:
        reason = f"the interpolation cannot be resolved: {reason}"
    return ConfigError(sentence(f"{where(layers, key)}: {reason}"))


def _place(layer: Layer, key: Key, shown: Key) -> str:
    line = layer.lines.get(key)
    place = layer.label if line is None else f"{layer.label}:{line}"
    return f"{place}: {'.'.join(shown)}" if shown else place


def value_at(tree: Any, key: Key) -> Any:
    """Return the value at `key` in nested dicts, or None."""
    for name in key:
        tree = tree.get(name) if isinstance(tree, dict) else None
    return tree


def _lines(node: yaml.Node, at: Key) -> Iterator[tuple[Key, int | None]]:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if key.tag == "tag:yaml.org,2002:merge":
                yield from _lines(value, at)
            elif isinstance(key, yaml.ScalarNode):
                yield (*at, key.value), key.start_mark.line + 1
                yield from _lines(value, (*at, key.value))
    elif isinstance(node, yaml.SequenceNode):
        for i, item in enumerate(node.value):
            yield (*at, str(i)), item.start_mark.line + 1
            yield from _lines(item, (*at, str(i)))
