"""Load a configuration: convert YAML to typed and checked options, or raise errors, one sentence per mistake.

Layers, lowest first: the components' defaults, `configs/`, the project file, `--options a.b=c`.
"""

import copy
import json
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass, make_dataclass, replace
from functools import partial, reduce
from pathlib import Path
from typing import Annotated, Any, ClassVar, get_args, get_type_hints

from annotated_types import MinLen

from crosstrain.config import bounds, sources
from crosstrain.config.registry import registry
from crosstrain.config.run_options import RunOptions
from crosstrain.config.schema import Checker, Component, Key, all_mistakes, defaults, options_class, to_plain
from crosstrain.utils import paths
from crosstrain.utils.errors import did_you_mean, sentence
from crosstrain.utils.trust import Trust

_RUN_COMPONENTS = {"runner": "runner", "optimizer": "optimizer", "lr_sched": "lr_scheduler"}
_SIZED = "model with its preset's sizes"  # internal key of the configuration tree, next to the user's sections
# Kind of component that has presets -> folder in configs/.
_PRESETS = {kind: f"{kind}s" for kind in ("runner", "dataset", "processor", "lr_scheduler", "objective")}
# Dataset key that is missing in configurations of older releases -> value that those releases used.
_EARLIER = {"split_rounding": "legacy"}
_SIDE_BY_SIDE = "side_by_side"  # the preset that combines several datasets of a project


@dataclass(frozen=True)
class Config:
    """A checked configuration. `registry.get(kind, component.name)` returns the class of a component."""

    model: Component
    sized: Component  # the model with its preset's sizes, for use without its pretrained folder
    model_type: str | None  # name of the model's preset, a file in configs/models/<arch>/
    adapter: Component | None
    datasets: dict[str, Component]
    run: RunOptions
    trust: Trust = Trust.COMMANDS  # permission to open the sources that the configuration names

    @property
    def plain(self) -> dict[str, Any]:
        """All options, resolved and explicit, as in config.yaml. `from_plain` does the reverse."""
        variant = {} if self.model_type is None else {"model_type": self.model_type}
        adapter = {} if self.adapter is None else {"adapter": to_plain(self.adapter)}
        model = {"arch": self.model.name, **variant, **adapter, **to_plain(self.model.options)}
        return {"model": model, "datasets": to_plain(self.datasets), "run": to_plain(self.run)}

    @staticmethod
    def from_plain(
        plain: Mapping[str, Any], options: sources.Overrides = (), label: str = "config", trust: Trust = Trust.COMMANDS
    ) -> "Config":
        """Read a configuration with all options explicit, and apply overrides. Only the overrides may name presets.

        `label` names the configuration in errors. Raises ConfigError as `load_config` does.
        """
        spelled_out, overrides = sources.plain_layer(label, sources.escape(dict(plain))), sources.read_options(options)
        return replace(_Builder(spelled_out, overrides, presets=False).build(), trust=trust)

    def continuing(self, state: Mapping[str, Any]) -> "Config":
        """Return this configuration with legacy values for the keys that the resumed checkpoint's run did not have.

        A run that was resumed this way stores the legacy values in its configuration, so later resumes keep these
        values. state: the checkpoint's state, with the configuration of its run.
        """
        old = json.dumps(state.get("config"))
        older = {key: value for key, value in _EARLIER.items() if not re.search(f'"{key}": (?!"{value}")', old)}
        datasets = json.loads(
            json.dumps(self.plain["datasets"]),
            object_hook=lambda part: part | {key: older[key] for key in part.keys() & older},
        )
        return replace(self, datasets=Config.from_plain(self.plain | {"datasets": datasets}).datasets)


ProjectLike = str | os.PathLike[str] | Mapping[str, Any]  # a project file, or its content


def load_config(project: ProjectLike, options: sources.Overrides = (), without: Key = ()) -> Config:
    """Load a project's configuration, from a file or from a dict with the same sections.

    `options` overrides keys of the project: `key=value` strings as on the command line, or a dict of dotted key ->
    value. The project's value at the key `without` is ignored. Raises ConfigError with one sentence (file, line and
    key) per mistake. Raises UserError if a component needs a package that is not installed.
    """
    return _builder(project, options, without).build()


def check_names(project: ProjectLike, options: sources.Overrides = ()) -> None:
    """Raise ConfigError for unknown sections, keys of `run` and components, without importing plugins.

    Prints a note on standard error about project keys that are dropped because `options` select other components.
    """
    _builder(project, options).check_names()


def _builder(project: ProjectLike, options: sources.Overrides, without: Key = ()) -> "_Builder":
    base = (
        sources.plain_layer("config", to_plain(project))
        if isinstance(project, Mapping)
        else sources.read_yaml(paths.find(project))
    )
    if without and isinstance(parent := sources.value_at(base.tree, without[:-1]), dict):
        parent.pop(without[-1], None)
    return _Builder(base, sources.read_options(options))


@dataclass
class _Sections:
    elsewhere: ClassVar = {f.name: f"use run.{f.name}" for f in fields(RunOptions)}

    model: dict[str, object]
    datasets: Annotated[dict[str, object], MinLen(1)]
    run: dict[str, object]


@dataclass
class _Saved(_Sections):
    datasets: dict[str, object]  # may be empty, for a Hugging Face folder


@dataclass
class _Names(_Sections):
    run: make_dataclass("_Run", [(f.name, object, None) for f in fields(RunOptions)])  # type: ignore[valid-type]


class _Builder:
    """Puts presets and defaults under the user's layers, and resolves and checks the result."""

    def __init__(self, base: sources.Layer, overrides: sources.Layer, presets: bool = True) -> None:
        self.base, self.overrides = base, overrides
        self.presets = presets  # True: names in `base` may be presets
        self.layers = [base, overrides]  # lowest first; presets are inserted below them
        self.check = Checker(partial(sources.where, self.layers), self._over_preset)
        self.tree: dict[str, Any] = reduce(
            sources.merge, copy.deepcopy([base.tree, overrides.tree]), {"run": defaults(RunOptions)}
        )
        self.given = {name: self.tree[name] for name in base.tree | overrides.tree}  # the user's sections

    def check_names(self) -> None:
        self.check.dataclass(_Names, self.given, ())
        self._add_plugins()
        with all_mistakes() as collected:
            for kind, key in self._components():
                at, files = (*key, sources.name_key(key)), self._preset_files(kind, key)
                name = sources.named(self.tree, key)
                if isinstance(name, str) and "${" not in name and name not in {*registry.names(kind), *files}:
                    with collected(), self.check.located(at):
                        registry.get(kind, name, files)  # `get` raises the error for an unknown name
        kept = {key for key, _ in sources.walk(self.tree)}
        gone = [key for key in self.base.lines if key not in kept and key[:-1] in kept]
        if left := [self.check.where(key) for key in gone if sources.named(self.overrides.tree, key[:-1])]:
            note = f"note: --options select different components, so these settings are ignored: {'; '.join(left)}"
            print(sentence(note), file=sys.stderr)

    def build(self) -> Config:
        """Return the checked configuration. Reports all mistakes at once, except those hidden by an earlier mistake."""
        self.check.dataclass(_Sections if self.presets else _Saved, self.given, ())
        self._add_plugins()
        parts: dict[str, Any] = {"datasets": {}}
        with all_mistakes() as collected:
            for kind, key in self._components():
                with collected():
                    self._complete(kind, key)
                    continue
                sources.value_at(self.tree, key[:-1]).pop(key[-1])
            tree = sources.resolve(self.tree, self.layers)  # an error here ends the block, to avoid follow-up errors
            datasets = {label: dict(entry) for label, entry in tree["datasets"].items()}
            ratios = {
                label: self.check.value(
                    bounds.NonNegativeFloat | None,
                    entry.pop("sample_ratio", None),
                    ("datasets", label, "sample_ratio"),
                )
                for label, entry in datasets.items()
            }
            with collected():
                if "model" in tree:
                    variant = tree["model"].get("model_type")
                    parts["model"] = self._model(tree["model"])
                    parts["sized"] = self._model(tree.get(_SIZED, tree["model"]))
                    parts["model_type"] = self.check.value(bounds.FilePath | None, variant, ("model", "model_type"))
            with collected():
                parts["adapter"] = self.check.value(
                    Annotated[Component, "adapter"] | None,
                    tree.get("model", {}).get("adapter"),
                    ("model", "adapter"),
                )
            for label, entry in datasets.items():
                with collected():
                    parts["datasets"][label] = self.check.component("dataset", entry, ("datasets", label))
            with collected():
                parts["run"] = self.check.dataclass(RunOptions, tree["run"], ("run",))
        if len(datasets) > 1:
            each = [
                {"label": label, "dataset": to_plain(part), "ratio": ratios[label]}
                for label, part in parts["datasets"].items()
            ]
            mixed = self.check.component("dataset", {"name": _SIDE_BY_SIDE, "parts": each}, ("datasets",))
            parts["datasets"] = {"+".join(datasets): mixed}
        return Config(**parts)

    def _model(self, tree: dict[str, Any]) -> Component:
        options = {key: value for key, value in tree.items() if key not in ("arch", "model_type", "adapter")}
        return self.check.component("model", {"name": tree["arch"], **options}, ("model",))

    def _components(self) -> list[tuple[str, Key]]:
        """Return (kind, key) of every component that may have presets."""
        return [
            ("model", ("model",)),
            *(("dataset", ("datasets", label)) for label in self.tree["datasets"]),
            *((kind, ("run", name)) for name, kind in _RUN_COMPONENTS.items()),
        ]

    def _add_plugins(self) -> None:
        key = ("run", "plugins")
        given = sources.resolve(self.tree, self.layers, key)
        for i, folder in enumerate(self.check.value(list[bounds.FilePath], given, key)):
            with self.check.located((*key, str(i))):
                registry.add_folder(paths.find(folder, self.base.label))

    def _complete(self, kind: str, key: Key) -> None:
        """Put the component's defaults and the presets under the user's values."""
        parent, own = sources.value_at(self.tree, key[:-1]), key[-1]
        given = parent[own]
        if isinstance(given, str):
            given = sources.resolve(self.tree, self.layers, key)
        if isinstance(given, str) and kind == "dataset":
            given = {"name": given}
        if not isinstance(given, dict):
            self.check.component(kind, given, key)  # `component` raises an error that names the expected types
        parent[own] = given = self.check.value(dict[str, object], given, key)
        naming = sources.name_key(key)
        at = (*key, naming)
        files = self._preset_files(kind, key)
        if naming not in given:
            others = [label for label in self.tree.get("datasets", ()) if label != own]
            origins = {layer.label for layer in self.layers if key in layer.lines}
            if kind == "dataset" and others and origins == {sources.OPTIONS}:  # the label is probably misspelled
                if own in (labels := others[0].split("+")):  # a saved run has one dataset with parts
                    self.check.fail(
                        key,
                        f"unknown key; did you mean datasets.{others[0]}.parts.{labels.index(own)}.dataset?",
                    )
                self.check.unknown_key(key, others)
            self.check.name_required(kind, at, files)
        name = self.check.value(str, sources.resolve(self.tree, self.layers, at), at)
        name, presets = _presets(name, dict(files), key)
        with self.check.located(at):
            cls = options_class(kind, registry.get(kind, name, files))
        if kind == "model":
            presets = self._model_preset(name, given)
        self.layers[:0] = presets
        below = reduce(
            sources.merge,
            (sources.value_at(layer.tree, key) for layer in presets),
            defaults(cls) | self._earlier(cls),
        )
        if kind == "model" and (rest := self._unpublished(cls, below, given)) != below:
            self.tree[_SIZED] = sources.merge(below | {naming: name}, given | {naming: name}, key)
            below = rest
        parent[own] = sources.merge(below | {naming: name}, given | {naming: name}, key)

    def _earlier(self, cls: type) -> dict[str, Any]:
        return {} if self.presets else {f.name: _EARLIER[f.name] for f in fields(cls) if f.name in _EARLIER}

    def _model_preset(self, arch: str, given: dict[str, Any]) -> list[sources.Layer]:
        key = ("model", "model_type")
        if not self.presets and key in self.overrides.lines:
            self.check.fail(key, f"cannot be changed, because {self.base.label} contains all options of the model")
        if not self.presets or given.get("model_type") is None:
            return []
        variant = self.check.value(str, sources.resolve(self.tree, self.layers, key), key)
        known = model_types(arch)
        if variant not in known:
            hint = did_you_mean(variant, known, f"known: {', '.join(known) or 'none'}")
            self.check.fail(key, f"there is no configs/models/{arch}/{variant}.yaml; {hint}")
        return [sources.read_yaml(known[variant], ("model",))]

    def _over_preset(self, kind: str, given: dict[str, Any]) -> dict[str, Any]:
        """Apply the preset of a component that is nested in other options."""
        name, presets = _presets(given["name"], files := preset_files(kind))
        cls = options_class(kind, registry.get(kind, name, files))  # the error for an unknown name lists presets, too
        return reduce(sources.merge, [self._earlier(cls), *(layer.tree for layer in presets), {**given, "name": name}])

    def _unpublished(self, cls: type, below: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
        """Reset options in `below` to their defaults if pretrained folders in `given` determine their values."""
        out = dict(below)
        if given.get("pretrained"):
            out |= {key: value for key, value in defaults(cls).items() if key in getattr(cls, "published", ())}
        for name, hint in get_type_hints(cls, include_extras=True).items():
            if isinstance(inner := given.get(name), dict) and isinstance(out.get(name), dict):
                kind, named = get_args(hint)[1:], inner.get("name", out[name].get("name"))
                if kind and named in registry.names(kind[0]):
                    hint = options_class(kind[0], registry.get(kind[0], named))
                if isinstance(hint, type) and is_dataclass(hint):
                    out[name] = self._unpublished(hint, out[name], inner)
        return out

    def _preset_files(self, kind: str, key: Key) -> dict[str, Path]:
        """Return the presets that the component at `key` may name: name -> file."""
        return preset_files(kind) if self.presets or sources.named(self.overrides.tree, key) else {}


def preset_files(kind: str) -> dict[str, Path]:
    """Return the presets in configs/ for this kind of component: name -> file."""
    return _yaml_files(paths.home() / "configs" / _PRESETS[kind]) if kind in _PRESETS else {}


def preset_component(kind: str, name: str) -> str:
    """Return the name of the component that `name`, a component or a preset, stands for."""
    return _presets(name, preset_files(kind))[0]


def _presets(name: str, files: dict[str, Path], key: Key = ()) -> tuple[str, list[sources.Layer]]:
    """Return the name of the component that `name` stands for, and the presets between the two, lowest first."""
    found: list[sources.Layer] = []
    while file := files.pop(name, None):
        layer = sources.read_yaml(file, key)
        name = str(sources.value_at(layer.tree, key).pop("name", name))
        found.insert(0, layer)
    return name, found


def model_types(arch: str) -> dict[str, Path]:
    """Return the presets of a model in configs/models/: name -> file."""
    return _yaml_files(paths.home() / "configs" / "models" / arch)


def _yaml_files(folder: Path) -> dict[str, Path]:
    return {file.stem: file for file in sorted(folder.glob("*.yaml"))}
