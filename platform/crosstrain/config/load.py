"""Loading of a configuration: YAML in, typed and checked options out, or one sentence for each mistake.

Layers, lowest first: the defaults that components declare, `configs/`, the project file, `--options a.b=c`.
"""

from __future__ import annotations

import copy
import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any, get_args, get_type_hints

from crosstrain.config import bounds
from crosstrain.config.registry import registry
from crosstrain.config.run_options import RunOptions
from crosstrain.config.schema import Checker, Component, Key, Mistakes, defaults, nearest, options_class, to_plain
from crosstrain.config.sources import (
    Layer,
    Origins,
    escape,
    merge,
    name_key,
    names_component,
    plain_layer,
    read_options,
    read_yaml,
    resolve,
)
from crosstrain.utils import paths
from crosstrain.utils.errors import ConfigError, UserError
from crosstrain.utils.trust import Trust

_SECTIONS = ("model", "datasets", "run")
_RUN_COMPONENTS = {"runner": "runner", "optimizer": "optimizer", "lr_sched": "lr_scheduler"}
_SIZED = "model with its preset's sizes"  # beside the sections
_PRESETS = {"runner": "runners", "dataset": "datasets"}  # kinds whose names may be files in configs/


@dataclass(frozen=True)
class Config:
    """A checked configuration; `registry.get(kind, component.name)` gives the class of a component."""

    model: Component
    sized: Component  # the model with its preset's sizes also where a pretrained folder, which may be away, has its own
    model_type: str | None  # the file in configs/models/<arch>/ that the model's options started from
    datasets: dict[str, Component]
    run: RunOptions
    trust: Trust = Trust.COMMANDS  # how far what it names may be opened

    @property
    def plain(self) -> dict[str, Any]:
        """All options resolved and spelled out, as config.yaml holds them; `from_plain` reads it back."""
        variant = {} if self.model_type is None else {"model_type": self.model_type}
        model = {"arch": self.model.name, **variant, **to_plain(self.model.options)}
        return {"model": model, "datasets": to_plain(self.datasets), "run": to_plain(self.run)}

    @staticmethod
    def from_plain(
        plain: Mapping[str, Any], options: Iterable[str] = (), label: str = "config", trust: Trust = Trust.COMMANDS
    ) -> Config:
        """Read a configuration that `plain` spells out, with overrides; only the overrides may name presets.

        `label` names it in errors. Raises ConfigError as `load_config` does.
        """
        spelled_out, overrides = plain_layer(label, escape(dict(plain))), read_options(options)
        return replace(_Builder(spelled_out, overrides, presets=False).build(), trust=trust)


def load_config(cfg_path: str | Path, options: Iterable[str] = ()) -> Config:
    """Load the configuration of a project file, with `key=value` overrides from the command line.

    Raises ConfigError, one sentence with file, line and key, for anything that is wrong with it, and
    UserError when a component that it names needs a package that is not installed.
    """
    return _Builder(read_yaml(paths.find(cfg_path)), read_options(options), presets=True).build()


class _Builder:
    """A builder that puts presets and defaults under the user's layers, resolves the result and checks it."""

    def __init__(self, base: Layer, overrides: Layer, presets: bool) -> None:
        self.base, self.overrides = base, overrides
        self.presets = presets  # whether names in `base` may stand for presets
        self.origins = Origins([base, overrides])
        self.check = Checker(self.origins.where)
        trees = copy.deepcopy([base.tree, overrides.tree])
        self.tree: dict[str, Any] = reduce(merge, trees, {"run": defaults(RunOptions)})

    def build(self) -> Config:
        """Return the checked configuration. Raises all mistakes at once, except those that an earlier one hides."""
        mistakes = Mistakes()
        self._check_sections(mistakes)
        try:
            self._add_plugins()
            for kind, key in self._components():
                with mistakes:
                    self._complete(kind, key)
                    continue
                reduce(getitem, key[:-1], self.tree).pop(key[-1])
            tree = resolve(self.tree, self.origins)
        except UserError as error:  # from which others may follow
            mistakes.errors.append(error)
            mistakes.raise_all()
            raise
        parts: dict[str, Any] = {"datasets": {}}
        with mistakes:
            if "model" in tree:
                variant = tree["model"].get("model_type")
                parts["model"] = self._model(tree["model"])
                parts["sized"] = self._model(tree.get(_SIZED, tree["model"]))
                parts["model_type"] = self.check.value(bounds.FilePath | None, variant, ("model", "model_type"))
        for label, entry in tree.get("datasets", {}).items():
            with mistakes:
                parts["datasets"][label] = self.check.component("dataset", entry, ("datasets", label))
        with mistakes:
            if "run" in tree:
                parts["run"] = self.check.dataclass(RunOptions, tree["run"], ("run",))
        mistakes.raise_all()
        return Config(**parts)

    def _model(self, tree: dict[str, Any]) -> Component:
        options = {key: value for key, value in tree.items() if key not in ("arch", "model_type")}
        return self.check.component("model", {"name": tree["arch"], **options}, ("model",))

    def _check_sections(self, mistakes: Mistakes) -> None:
        """Check the sections' names, and drop unknown ones."""
        run_keys, meant = {f.name for f in fields(RunOptions)}, set[str]()
        for name in [name for name in self.tree if name not in _SECTIONS]:
            del self.tree[name]
            with mistakes:
                if name in run_keys:
                    self.check.fail((name,), f"unknown section; did you mean run.{name}?")
                meant.update(nearest(str(name), _SECTIONS))
                self.check.unknown_key((str(name),), _SECTIONS)
        for name in _SECTIONS:
            with mistakes:
                if name in self.base.tree or name in self.overrides.tree:
                    self.check.value(dict[str, object], self.tree[name], (name,))
                    if self.tree[name] or name != "datasets":
                        continue
                    self.check.fail((name,), "at least one dataset is required")
                if name not in meant:
                    raise ConfigError(f"{self.base.label}: {name}: this section is required, but missing")
            self.tree.pop(name, None)

    def _components(self) -> list[tuple[str, Key]]:
        """Return kind and key of every component that may have presets."""
        found: list[tuple[str, Key]] = [("model", ("model",))] if "model" in self.tree else []
        found += [("dataset", ("datasets", label)) for label in self.tree.get("datasets", ())]
        return found + [(kind, ("run", name)) for name, kind in _RUN_COMPONENTS.items() if "run" in self.tree]

    def _add_plugins(self) -> None:
        key = ("run", "plugins")
        given = resolve(self.tree, self.origins, key) if "run" in self.tree else []
        for i, folder in enumerate(self.check.value(list[bounds.FilePath], given, key)):
            with self.check.located((*key, str(i))):
                registry.add_folder(paths.find(folder))

    def _complete(self, kind: str, key: Key) -> None:
        """Put the component's defaults and the presets under the user's values."""
        *section, own = key
        parent = reduce(getitem, section, self.tree)
        given = parent[own]
        if isinstance(given, str):
            given = resolve(self.tree, self.origins, key)
        if isinstance(given, str) and kind == "dataset":
            given = {"name": given}
        if not isinstance(given, dict) and kind != "model":
            self.check.component(kind, given, key)  # which says what it may be
        parent[own] = given = self.check.value(dict[str, object], given, key)
        self._require_name(kind, key, given)
        name = self.check.value(str, resolve(self.tree, self.origins, (*key, name_key(key))), (*key, name_key(key)))
        name, presets = self._presets(kind, key, name)
        with self.check.located((*key, name_key(key))):
            component = registry.get(kind, name, self._preset_files(kind, key))
            default = defaults(options_class(kind, component))
        if kind == "model":
            presets = self._model_preset(name, given)
        self.origins.layers[:0] = presets
        below = reduce(merge, [reduce(getitem, key, layer.tree) for layer in presets], default)
        named = {name_key(key): name}
        if kind == "model" and (rest := _unpublished(options_class(kind, component), below, given)) != below:
            self.tree[_SIZED] = merge(below | named, given | named, key)
            below = rest
        parent[own] = merge(below | named, given | named, key)

    def _require_name(self, kind: str, key: Key, given: dict[str, Any]) -> None:
        if name_key(key) in given:
            return
        others = [label for label in self.tree.get("datasets", ()) if label != key[-1]]
        if kind == "dataset" and others and self.origins.only_in_options(key):  # a label that is misspelled
            self.check.unknown_key(key, others)
        names = [*registry.names(kind), *self._preset_files(kind, key)]
        self.check.fail((*key, name_key(key)), f"the {kind}'s name is required; known: {', '.join(names) or 'none'}")

    def _model_preset(self, arch: str, given: dict[str, Any]) -> list[Layer]:
        key = ("model", "model_type")
        if not self.presets:
            if key in self.overrides.lines:
                self.check.fail(key, f"cannot be changed, because {self.base.label} spells out the whole model")
            return []
        if given.get("model_type") is None:
            return []
        variant = self.check.value(str, resolve(self.tree, self.origins, key), key)
        known = _yaml_files(paths.home() / "configs" / "models" / arch)
        if variant not in known:
            near = difflib.get_close_matches(variant, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(known) or 'none'}"
            self.check.fail(key, f"there is no configs/models/{arch}/{variant}.yaml; {hint}")
        return [read_yaml(known[variant], ("model",))]

    def _presets(self, kind: str, key: Key, name: str) -> tuple[str, list[Layer]]:
        """Return the component that `name` stands for, and the presets on the way to it, lowest first."""
        files = self._preset_files(kind, key)
        found: list[Layer] = []
        while file := files.pop(name, None):
            layer = read_yaml(file, key)
            name = self.check.value(str, reduce(getitem, key, layer.tree).pop("name", name), (*key, "name"))
            found.insert(0, layer)
        return name, found

    def _preset_files(self, kind: str, key: Key) -> dict[str, Path]:
        """Return the presets that the name of the component at `key` may stand for."""
        return preset_files(kind) if self.presets or names_component(self.overrides.tree, key) else {}


def _unpublished(cls: type, below: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Put defaults back in `below` for options that the pretrained folders in `given` decide."""
    out = dict(below)
    if given.get("pretrained"):
        out |= {key: value for key, value in defaults(cls).items() if key in getattr(cls, "published", ())}
    for name, hint in get_type_hints(cls, include_extras=True).items():
        if isinstance(inner := given.get(name), dict) and isinstance(out.get(name), dict):
            kind, named = get_args(hint)[1:], inner.get("name", out[name].get("name"))
            if kind and named in registry.names(kind[0]):
                hint = options_class(kind[0], registry.get(kind[0], named))
            if isinstance(hint, type) and is_dataclass(hint):
                out[name] = _unpublished(hint, out[name], inner)
    return out


def preset_files(kind: str) -> dict[str, Path]:
    """Return the files in configs/ that a name of this kind of component may stand for."""
    return _yaml_files(paths.home() / "configs" / _PRESETS[kind]) if kind in _PRESETS else {}


def _yaml_files(folder: Path) -> dict[str, Path]:
    return {file.stem: file for file in sorted(folder.glob("*.yaml"))}
