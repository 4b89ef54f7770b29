"""The registry of components: from a kind and a name to a class or function, loaded on first use.

The names are read from the decorators `@registry.register_<kind>("name")` in each plugin file's syntax tree. A file is
imported when one of its names is asked for, so a broken plugin, or one whose dependencies are not installed, breaks
nothing but itself, and listing the components imports nothing.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import os
import re
import sys
from collections.abc import Callable, Iterable
from functools import partialmethod
from importlib import metadata
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any, TypeVar

from crosstrain.config.plugin_scan import Entry, scan_file
from crosstrain.utils import paths
from crosstrain.utils.errors import ConfigError, UserError
from crosstrain.utils.optional_deps import absent_package, missing

T = TypeVar("T")

ENTRY_POINTS = "crosstrain.plugins"
ENVIRONMENT = "CROSSTRAIN_PLUGINS"
PACKAGE = "crosstrain_plugins"  # plugin folders become sub-packages of this one, which exists in memory only


class Registry:
    """Every component that YAML can name, by kind and name.

    Sources, first owner of a name first: the built-in `plugins/`, the folders in CROSSTRAIN_PLUGINS, folders
    given to `add_folder`, and installed packages with an entry point in the group `crosstrain.plugins`.
    """

    def __init__(self) -> None:
        self._entries: dict[tuple[str, str], list[Entry]] = {}
        self._objects: dict[tuple[str, str], Any] = {}
        self._broken: dict[Path, str] = {}
        self._files: set[Path] = set()
        self._labels: dict[str, Path] = {}
        self._started = self._finished = False

    def register(self, kind: str, name: str) -> Callable[[T], T]:
        """Register the decorated class or function. Plugin files use `register_runner("mine")` and its like."""

        def decorate(component: T) -> T:
            here = _identity(component)
            there = _identity(self._objects.get((kind, name), component))
            if here != there:  # equal: the module was reloaded
                raise _claimed_twice(kind, name, paths.show(there[0]), paths.show(here[0]))
            self._objects[kind, name] = component
            return component

        return decorate

    register_runner = partialmethod(register, "runner")
    register_model = partialmethod(register, "model")
    register_dataset = partialmethod(register, "dataset")
    register_processor = partialmethod(register, "processor")
    register_optimizer = partialmethod(register, "optimizer")
    register_lr_scheduler = partialmethod(register, "lr_scheduler")
    register_reader = partialmethod(register, "reader")
    register_tracker = partialmethod(register, "tracker")

    def get(self, kind: str, name: str, others: Iterable[str] = ()) -> Any:
        """Return the class or function registered as `name`; imports its module on first use.

        `others` are further names that the error may suggest, such as presets. Raises ConfigError for a name that is
        unknown, claimed twice or whose module fails to import, and UserError naming the package and the extra when a
        dependency is not installed.
        """
        self._scan_sources()
        key = (kind, name)
        owners = self._entries.get(key, [])
        if len(owners) > 1:
            raise _claimed_twice(kind, name, *(f"{paths.show(e.file)}:{e.line}" for e in owners[:2]))
        if key not in self._objects and owners:
            self._import(owners[0])
        if key not in self._objects:
            raise self._unknown(kind, name, others)
        return self._objects[key]

    def names(self, kind: str) -> list[str]:
        """Names of this kind, sorted; imports nothing."""
        self._scan_sources()
        return sorted({name for k, name in [*self._entries, *self._objects] if k == kind})

    def entries(self, kind: str) -> list[Entry]:
        """Entries of plugin files for this kind, sorted by name; imports nothing."""
        self._scan_sources()
        return sorted((e for (k, _), found in self._entries.items() if k == kind for e in found), key=lambda e: e.name)

    def broken(self) -> dict[Path, str]:
        """Plugin files that could not be read or imported so far, with the reason."""
        self._scan_sources()
        return dict(self._broken)

    # ---- sources

    def add_folder(self, path: str | os.PathLike[str], label: str | None = None) -> None:
        """Read the plugins in a folder, whose files become `crosstrain_plugins.<label>.<path>`.

        `label` defaults to the folder's name. A folder added before is passed over. Raises ConfigError if
        there is no such folder.
        """
        self._scan_first_sources()
        self._add_folder(Path(path), label)

    def folders(self) -> list[tuple[str, Path]]:
        """(label, folder) of every folder of plugins so far, for another process to add."""
        self._scan_first_sources()
        return list(self._labels.items())

    def _scan_first_sources(self) -> None:
        if self._started:
            return
        builtin = paths.home() / "plugins"
        if builtin.is_dir():
            self._add_folder(builtin, "builtin")
        for folder in filter(None, os.environ.get(ENVIRONMENT, "").split(os.pathsep)):
            self._add_folder(Path(folder), None, f"{ENVIRONMENT}: ")
        self._started = True

    def _scan_sources(self) -> None:
        self._scan_first_sources()
        if self._finished:
            return
        self._finished = True
        for point in sorted(metadata.entry_points(group=ENTRY_POINTS), key=lambda p: (p.name, p.value)):
            spec = _find_without_importing(point.module)
            if spec is None:
                self._broken[Path(point.name)] = f"the entry point names the module {point.module}, which is not there"
            elif spec.submodule_search_locations:
                for location in spec.submodule_search_locations:
                    self._scan_folder(Path(location), point.module)
            elif spec.origin:
                self._scan(Path(spec.origin), point.module)

    def _add_folder(self, path: Path, label: str | None, prefix: str = "") -> None:
        folder = path.expanduser().resolve()
        if not folder.is_dir():
            raise ConfigError(f"{prefix}{path}: no such folder of plugins")
        if folder in self._labels.values():
            return
        stem = re.sub(r"\W", "_", label or folder.name)
        label = next(name for i in range(1, 10_000) if (name := stem if i == 1 else f"{stem}_{i}") not in self._labels)
        self._labels[label] = folder
        self._scan_folder(folder, f"{PACKAGE}.{label}")

    def _scan_folder(self, folder: Path, package: str) -> None:
        for directory, subfolders, files in os.walk(folder):
            subfolders[:] = sorted(d for d in subfolders if not d.startswith(".") and d != "__pycache__")
            for file in sorted(f for f in files if f.endswith(".py") and not f.startswith(".")):
                path = Path(directory, file)
                inside = path.relative_to(folder).with_suffix("").parts
                self._scan(path, ".".join([package, *(inside[:-1] if inside[-1] == "__init__" else inside)]))

    def _scan(self, file: Path, module: str) -> None:
        if file.resolve() in self._files:  # a folder inside another one
            return
        self._files.add(file.resolve())
        entries, problem = scan_file(file, module)
        for entry in entries:
            self._entries.setdefault((entry.kind, entry.name), []).append(entry)
        if problem:
            self._broken[file] = problem

    # ---- importing

    def _import(self, entry: Entry) -> None:
        what = f"{entry.kind} {entry.name!r} ({paths.show(entry.file)})"
        try:
            self._make_package(entry.module)
            importlib.import_module(entry.module)
        except UserError:
            raise
        except Exception as error:
            reason = f"{type(error).__name__}: {error}".replace("\n", " ")
            self._broken[entry.file] = reason
            package = absent_package(error)
            if package is not None and package != PACKAGE:
                raise missing(what, package) from error
            raise ConfigError(f"{what} cannot be used, because importing it failed: {reason}") from error
        if (entry.kind, entry.name) not in self._objects:
            raise ConfigError(f"{what} was not registered when its file was imported: is the decorator conditional?")

    def _make_package(self, module: str) -> None:
        """Put the package that `module` lies in into sys.modules, if it is a folder of plugins."""
        root, _, rest = module.partition(".")
        label = rest.partition(".")[0]
        if root != PACKAGE or f"{root}.{label}" in sys.modules:
            return
        if root not in sys.modules:
            sys.modules[root] = importlib.util.module_from_spec(ModuleSpec(root, None, is_package=True))
        name, folder = f"{root}.{label}", self._labels[label]
        spec: ModuleSpec | None = ModuleSpec(name, None, is_package=True)
        if (init := folder / "__init__.py").is_file():
            spec = importlib.util.spec_from_file_location(name, init)
        assert spec is not None
        spec.submodule_search_locations = [str(folder)]
        sys.modules[name] = package = importlib.util.module_from_spec(spec)
        setattr(sys.modules[root], label, package)
        try:
            if spec.loader is not None:
                spec.loader.exec_module(package)
        except BaseException:
            del sys.modules[name]
            raise

    def _unknown(self, kind: str, name: str, others: Iterable[str]) -> ConfigError:
        known = sorted({*self.names(kind), *others})
        parts = [f"there is no {kind} called {name!r}"]
        if near := difflib.get_close_matches(name, known, n=3):
            parts.append("did you mean " + " or ".join(near) + "?")
        parts.append("known: " + (", ".join(known) or "none"))
        if self._broken:
            failed = ", ".join(f"{paths.show(file)} ({reason})" for file, reason in self._broken.items())
            parts.append("plugins that failed: " + failed)
        return ConfigError("; ".join(parts))


def _claimed_twice(kind: str, name: str, first: str, second: str) -> ConfigError:
    return ConfigError(f"{kind} {name!r} is already registered by {first}, so {second} must choose another name")


def _identity(component: Any) -> tuple[Path, str]:
    """File and qualified name of a class or function."""
    module = getattr(component, "__module__", "?")
    file = getattr(sys.modules.get(module), "__file__", None) or module
    return Path(file), getattr(component, "__qualname__", "")


def _find_without_importing(module: str) -> ModuleSpec | None:
    """Find a module's spec; unlike `importlib.util.find_spec`, import no parent package."""
    search: list[str] | None = None
    spec: ModuleSpec | None = None
    parts = module.split(".")
    for i in range(len(parts)):
        spec = PathFinder.find_spec(".".join(parts[: i + 1]), search)
        if spec is None:
            return None
        search = list(spec.submodule_search_locations or [])
    return spec


registry = Registry()
