"""Layers of configuration: reading, merging and resolving them, and remembering where every key came from."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from crosstrain import paths
from crosstrain.check import Key, one_line
from crosstrain.errors import ConfigError, first_line

OPTIONS = "--options"

# The key that says which thing a mapping is about; a plain string in the mapping's place is short for it.
_HEADS = {("model",): "arch", ("run", "amp"): "dtype", ("run", "on_bad_step"): "policy"}


def head(key: Key) -> str:
    """The key under `key` that names the component there: `name`, for the model `arch`."""
    return _HEADS.get(key, "name")


@dataclass
class Layer:
    """One source of configuration. `lines` has every key in it, with its line where there are lines."""

    label: str
    tree: dict[str, Any]
    lines: dict[Key, int | None] = field(default_factory=dict)


@dataclass
class Origins:
    """Where keys of the merged configuration come from. Layers stand lowest first."""

    layers: list[Layer] = field(default_factory=list)

    def where(self, key: Key) -> str:
        """`file:line: key`, from the highest layer that has `key`, or else the nearest section around it.

        The key is shown as it was written: `run.runner`, not `run.runner.name`, for `runner: ddp`.
        """
        for layer in reversed(self.layers):
            if key in layer.lines:
                return _place(layer, key, key)
            if key[-1:] == (head(key[:-1]),) and isinstance(_value(layer.tree, key[:-1]), str):
                return _place(layer, key[:-1], key[:-1])
        files = [layer for layer in reversed(self.layers) if layer.label != OPTIONS]
        for length in range(len(key) - 1, 0, -1):
            for layer in files:
                if key[:length] in layer.lines:
                    return _place(layer, key[:length], key)
        return _place(files[0], (), key)

    def only_in_options(self, key: Key) -> bool:
        return {layer.label for layer in self.layers if key in layer.lines} == {OPTIONS}


def read_yaml(path: Path, at: Key = ()) -> Layer:
    """The mapping in a YAML file, put under the key `at`; ConfigError with the line of what is wrong."""
    label = paths.show(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        if root is None:
            raise ConfigError(f"{label}: the file is empty")
        if not isinstance(root, yaml.MappingNode):
            raise ConfigError(f"{label}:{root.start_mark.line + 1}: expected a mapping of keys to values")
        lines = dict(_lines(root, at))
        tree = OmegaConf.to_container(OmegaConf.create(text))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise ConfigError(f"{label}:{mark.line + 1 if mark else 1}: not valid YAML: {error.problem}") from error
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(one_line(f"{label}: cannot be read: {error}")) from error
    except RecursionError as error:
        raise ConfigError(f"{label}: an anchor contains itself, or the file is nested too deep") from error
    except OmegaConfBaseException as error:
        raise _unresolved(error, Origins([Layer(label, {}, lines)]), []) from error
    return Layer(label, _under(at, cast(dict[str, Any], tree)), lines)


def read_options(options: Iterable[str]) -> Layer:
    """Command-line overrides `a.b=value`, the value in YAML; of two for the same key the later one counts."""
    tree: dict[str, Any] = {}
    for option in options:
        key, separator, _ = option.partition("=")
        if not separator or not all(part.strip() for part in key.split(".")):
            raise ConfigError(f"{OPTIONS}: {option!r} is not of the form key=value, such as run.seed=1")
        try:
            parsed = OmegaConf.to_container(OmegaConf.from_dotlist([option]))
        except yaml.MarkedYAMLError as error:
            raise ConfigError(f"{OPTIONS}: {key}: the value is not valid YAML: {error.problem}") from error
        except OmegaConfBaseException as error:
            raise ConfigError(f"{OPTIONS}: {key}: {first_line(error)}") from error
        tree = merge(tree, parsed, names_replace=False)
    return plain_layer(OPTIONS, tree)


def plain_layer(label: str, tree: dict[str, Any], at: Key = ()) -> Layer:
    """A layer that has no lines."""
    return Layer(label, _under(at, tree), dict.fromkeys(_keys(tree, at)))


def merge(lower: Any, upper: Any, key: Key = (), *, names_replace: bool = True) -> Any:
    """`upper` over `lower`, mapping by mapping.

    A string over or under a mapping that names something stands for its head: `zero2` for {name: zero2}.
    Where the upper one names another component, the lower one's options are not meant for it and go.
    """
    naming = head(key)
    if isinstance(upper, str) and isinstance(lower, dict) and (naming in lower or not names_replace):
        upper = {naming: upper}
    if isinstance(lower, str) and isinstance(upper, dict):
        lower = {naming: lower}
    if not (isinstance(lower, dict) and isinstance(upper, dict)):
        return upper
    old, new = lower.get(naming), upper.get(naming)
    if names_replace and isinstance(old, str) and isinstance(new, str) and old != new and naming in ("name", "arch"):
        return upper
    merged = lower | upper
    for name in lower.keys() & upper.keys():
        merged[name] = merge(lower[name], upper[name], (*key, str(name)), names_replace=names_replace)
    return merged


def literal(value: Any) -> Any:
    """`value` escaped so that `resolve` gives it back: what is resolved already may well contain ${}."""
    if isinstance(value, dict):
        return {name: literal(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [literal(item) for item in value]
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", value) if isinstance(value, str) else value


def names_component(tree: Any, key: Key) -> bool:
    """Whether `tree` itself says which component stands at `key`."""
    value = _value(tree, key)
    return isinstance(value, str) or (isinstance(value, dict) and head(key) in value)


def resolve(tree: dict[str, Any], origins: Origins) -> dict[str, Any]:
    """`tree` with every ${interpolation} replaced by its value."""
    try:
        resolved = OmegaConf.to_container(OmegaConf.create(tree), resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise _unresolved(error, origins, [".".join(key) for key in _keys(tree)]) from error
    return cast(dict[str, Any], resolved)


def resolve_at(tree: dict[str, Any], key: Key, origins: Origins) -> Any:
    """The value at `key` alone, resolved."""
    value = _value(tree, key)
    if "${" not in str(value) and value != "???":
        return value  # OmegaConf would copy the whole tree to find out
    try:
        node: Any = OmegaConf.create(tree)
        for name in key:
            node = node[name]
        return OmegaConf.to_container(node, resolve=True) if OmegaConf.is_config(node) else node
    except OmegaConfBaseException as error:
        raise _unresolved(error, origins, [".".join(key) for key in _keys(tree)]) from error


def _unresolved(error: OmegaConfBaseException, origins: Origins, known: list[str]) -> ConfigError:
    key = tuple(re.findall(r"[^.\[\]]+", str(error.full_key or "")))
    reason = first_line(error)
    if "Missing mandatory value" in reason:
        reason = "required, but still ???"
    elif target := re.search(r"Interpolation key '(.+?)' not found", reason):
        near = difflib.get_close_matches(target[1], known, n=1)
        reason = f"${{{target[1]}}} stands for no key" + (f"; did you mean ${{{near[0]}}}?" if near else "")
    else:
        reason = f"the interpolation cannot be resolved: {reason}"
    return ConfigError(one_line(f"{origins.where(key)}: {reason}"))


def _place(layer: Layer, key: Key, shown: Key) -> str:
    line = layer.lines.get(key)
    place = layer.label if line is None else f"{layer.label}:{line}"
    return f"{place}: {'.'.join(shown)}" if shown else place


def _value(tree: Any, key: Key) -> Any:
    for name in key:
        tree = tree.get(name) if isinstance(tree, dict) else None
    return tree


def _under(at: Key, tree: dict[str, Any]) -> dict[str, Any]:
    for name in reversed(at):
        tree = {name: tree}
    return tree


def _keys(tree: Any, at: Key = ()) -> Iterator[Key]:
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for name, value in items:
        yield (*at, str(name))
        yield from _keys(value, (*at, str(name)))


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
