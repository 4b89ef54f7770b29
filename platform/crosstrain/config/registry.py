"""The registry of components: maps (kind, name) to a class or function, loaded on first use.

The names are read from the decorators `@registry.register_<kind>("name")` in each plugin file's syntax tree. A file is
parsed when a name of one of its kinds is requested, and imported only when one of its components is requested. Broken
plugins and missing dependencies therefore do not affect other plugins, and listing the components imports nothing.
"""

import ast
import difflib
import importlib.util
import os
import re
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partialmethod
from importlib.machinery import ModuleSpec, PathFinder
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

from crosstrain.utils import (
    logging,  # noqa: F401 - silences libraries before plugins import them
    paths,
)
from crosstrain.utils.errors import ConfigError, UserError, did_you_mean
from crosstrain.utils.optional_deps import absent_package, missing

T = TypeVar("T")

ENTRY_POINTS = "crosstrain.plugins"
ENVIRONMENT = "CROSSTRAIN_PLUGINS"
PACKAGE = "crosstrain_plugins"  # parent package of all modules in plugin folders and files


@dataclass(frozen=True)
class Entry:
    """A component that a file registers."""

    kind: str
    name: str
    file: Path
    line: int  # line of the class or function
    summary: str  # first line of the docstring of the class or function
    module: str  # module name for importing the file


class Registry:
    """All components that YAML can name, by kind and name.

    Sources, in this order: the core's commands, the built-in `plugins/`, folders and files in CROSSTRAIN_PLUGINS,
    installed packages with an entry point in the group `crosstrain.plugins`, and paths given to `add_folder`.
    """

    def __init__(self) -> None:
        self._entries: dict[tuple[str, str], list[Entry]] = {}
        self._objects: dict[tuple[str, str], Any] = {}
        self.broken: dict[Path, str] = {}  # plugin file that could not be read or imported -> reason
        self._files: set[str] = set()
        self._unparsed: list[tuple[set[str], Path, bytes, str]] = []  # kinds, file, source, module
        self._labels: dict[str, Path] = {}
        self._started = False

    def register(self, kind: str, name: str) -> Callable[[T], T]:
        """Register the decorated class or function. Plugin files use `register_runner("mine")` and similar methods."""

        def decorate(component: T) -> T:
            here = _identity(component)
            there = _identity(self._objects.get((kind, name), component))
            if here != there:  # the two are equal if the module was reloaded
                raise _claimed_twice(kind, name, paths.show(there[0]), paths.show(here[0]))
            self._objects[kind, name] = component
            return component

        return decorate

    register_runner = partialmethod(register, "runner")
    register_model = partialmethod(register, "model")
    register_adapter = partialmethod(register, "adapter")
    register_dataset = partialmethod(register, "dataset")
    register_processor = partialmethod(register, "processor")
    register_objective = partialmethod(register, "objective")
    register_reward = partialmethod(register, "reward")
    register_environment = partialmethod(register, "environment")
    register_optimizer = partialmethod(register, "optimizer")
    register_lr_scheduler = partialmethod(register, "lr_scheduler")
    register_reader = partialmethod(register, "reader")
    register_converter = partialmethod(register, "converter")
    register_tracker = partialmethod(register, "tracker")
    register_callback = partialmethod(register, "callback")
    register_metric = partialmethod(register, "metric")
    register_evaluation = partialmethod(register, "evaluation")
    register_command = partialmethod(register, "command")
    register_preflight = partialmethod(register, "preflight")
    register_hints = partialmethod(register, "hints")

    def get(self, kind: str, name: str, others: Iterable[str] = ()) -> Any:
        """Return the class or function registered as `name`. The module is imported on first use.

        `others` are further names that the error may suggest, such as presets. Raises ConfigError if the name is
        unknown or registered twice, or if its module fails to import. Raises UserError, with the package and the extra
        to install, if a dependency is missing.
        """
        self._parse(kind)
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
        """Return the names of this kind, sorted, without importing anything."""
        self._parse(kind)
        return sorted({name for k, name in [*self._entries, *self._objects] if k == kind})

    def instances(self, kind: str) -> dict[str, Any]:
        """Return name -> a new instance of every class of this kind, sorted by name. Imports their modules."""
        return {name: self.get(kind, name)() for name in self.names(kind)}

    def entries(self, kind: str) -> list[Entry]:
        """Return the entries of plugin files for this kind, sorted by name, without importing anything."""
        self._parse(kind)
        return sorted((e for (k, _), found in self._entries.items() if k == kind for e in found), key=lambda e: e.name)

    # ---- sources

    def add_folder(self, path: str | os.PathLike[str], label: str | None = None) -> None:
        """Add a plugin folder, or a single file. A folder's files become `crosstrain_plugins.<label>.<path>`.

        `label` defaults to the name of the folder or file. Adding a path again has no effect. Raises ConfigError if
        there is no such folder or .py file.
        """
        self._scan_sources()
        self._add_folder(Path(path), label)

    def folders(self) -> list[tuple[str, Path]]:
        """Return (label, path) of each plugin folder and file added so far; a new process can add the same ones."""
        self._scan_sources()
        return list(self._labels.items())

    def _scan_sources(self) -> None:
        if self._started:
            return
        self._scan_folder(Path(__file__).parent.parent / "cli", "crosstrain.cli")
        builtin = paths.home() / "plugins"
        if builtin.is_dir():
            self._add_folder(builtin, "builtin")
        for folder in filter(None, os.environ.get(ENVIRONMENT, "").split(os.pathsep)):
            self._add_folder(Path(folder), None, f"{ENVIRONMENT}: ")
        self._started = True
        for point in _entry_points():
            spec = find_without_importing(point.module)
            if spec is None:
                self.broken[Path(point.name)] = f"the module {point.module} of the entry point does not exist"
            elif spec.submodule_search_locations:
                for location in spec.submodule_search_locations:
                    self._scan_folder(Path(location), point.module)
            elif spec.origin:
                self._scan(Path(spec.origin), point.module)

    def _add_folder(self, path: Path, label: str | None, prefix: str = "") -> None:
        folder = path.expanduser().resolve()
        is_file = folder.suffix == ".py" and folder.is_file()
        if not is_file and not folder.is_dir():
            raise ConfigError(f"{prefix}{path}: not a folder of plugins or a .py file")
        if folder in self._labels.values():
            return
        stem = re.sub(r"\W", "_", label or folder.name.removesuffix(".py"))
        label = next(name for i in range(1, 10_000) if (name := stem if i == 1 else f"{stem}_{i}") not in self._labels)
        self._labels[label] = folder
        (self._scan if is_file else self._scan_folder)(folder, f"{PACKAGE}.{label}")

    def _scan_folder(self, folder: Path, package: str) -> None:
        for path in sorted(folder.rglob("*.py")):
            inside = path.relative_to(folder).with_suffix("").parts
            if not any(part.startswith(".") or part == "__pycache__" for part in inside):
                self._scan(path, ".".join([package, *(inside[:-1] if inside[-1] == "__init__" else inside)]))

    def _scan(self, file: Path, module: str) -> None:
        path = os.path.realpath(file)  # faster than `Path.resolve`
        if path in self._files:  # the file is in a folder that was already scanned
            return
        self._files.add(path)
        try:
            source = file.read_bytes()
        except OSError as error:
            self.broken[file] = f"{type(error).__name__}: {error}"
        else:
            if kinds := {word.decode() for word in re.findall(rb"registry\s*\.\s*register_(\w+)", source)}:
                self._unparsed.append((kinds, file, source, module))

    def _parse(self, kind: str | None = None) -> None:
        """Parse the files that may register components of this kind; None: all files."""
        self._scan_sources()
        waiting, self._unparsed = self._unparsed, []
        for unparsed in waiting:
            kinds, file, source, module = unparsed
            if kind is not None and kind not in kinds and kinds <= set(KINDS):
                self._unparsed.append(unparsed)
                continue
            entries, problem = _registered(source, file, module)
            for entry in entries:
                self._entries.setdefault((entry.kind, entry.name), []).append(entry)
            if problem:
                self.broken[file] = problem

    # ---- importing

    def _import(self, entry: Entry) -> None:
        what = f"{entry.kind} {entry.name!r} ({paths.show(entry.file)})"
        try:
            importlib.import_module(entry.module)
        except UserError:
            raise
        except Exception as error:
            reason = f"{type(error).__name__}: {error}".replace("\n", " ")
            self.broken[entry.file] = reason
            if (package := absent_package(error)) is not None:
                raise missing(what, package) from error
            raise ConfigError(f"{what} cannot be used, because importing it failed: {reason}") from error
        if (entry.kind, entry.name) not in self._objects:
            raise ConfigError(f"{what} was not registered when its file was imported: is the decorator conditional?")

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        """Find the module of a plugin folder or file. This makes the registry a finder for `sys.meta_path`."""
        root, _, label = name.partition(".")
        if root != PACKAGE or not label:
            return None
        self._scan_sources()
        if (place := self._labels.get(label)) is None:
            return None
        if (file := place if place.is_file() else place / "__init__.py").is_file():
            return importlib.util.spec_from_file_location(name, file)
        spec = ModuleSpec(name, None, is_package=True)
        spec.submodule_search_locations = [str(place)]
        return spec

    def _unknown(self, kind: str, name: str, others: Iterable[str]) -> ConfigError:
        self._parse()
        known = sorted({*self.names(kind), *others})
        near = difflib.get_close_matches(name, known, n=3)
        failed = ", ".join(f"{paths.show(file)} ({reason})" for file, reason in self.broken.items())
        parts = [
            f"there is no {kind} called {name!r}",
            f"did you mean {' or '.join(near)}?" if near else "",
            f"known: {', '.join(known) or 'none'}",
            f"plugins that failed to load: {failed}" if failed else "",
        ]
        return ConfigError("; ".join(filter(None, parts)))


KINDS = tuple(name.removeprefix("register_") for name in vars(Registry) if name.startswith("register_"))


def _claimed_twice(kind: str, name: str, first: str, second: str) -> ConfigError:
    return ConfigError(f"{kind} {name!r} is already registered by {first}, so {second} must choose a different name")


def _identity(component: Any) -> tuple[Path, str]:
    """Return the file and the qualified name of a class or function."""
    module = getattr(component, "__module__", "?")
    file = getattr(sys.modules.get(module), "__file__", None) or module
    return Path(file), getattr(component, "__qualname__", "")


def _entry_points() -> list[Any]:
    """Return the entry points of installed plugin packages, sorted."""
    files = chain.from_iterable(Path(folder).glob("*-info/entry_points.txt") for folder in sys.path)
    if not any(ENTRY_POINTS.encode() in file.read_bytes() for file in files):
        return []  # most often; importing the next module would take a third of the time of `crosstrain --help`
    from importlib import metadata

    return sorted(metadata.entry_points(group=ENTRY_POINTS), key=lambda point: (point.name, point.value))


def find_without_importing(module: str) -> ModuleSpec | None:
    """Find a module's spec without importing its parent packages, unlike `importlib.util.find_spec`."""
    parent = module.rpartition(".")[0]
    above = find_without_importing(parent) if parent else None
    search = list((above and above.submodule_search_locations) or [])
    return PathFinder.find_spec(module, search if parent else None)


def _registered(source: bytes, file: Path, module: str) -> tuple[list[Entry], str | None]:
    """Return the components that `file` (importable as `module`) registers, and an error message or None."""
    try:
        tree = ast.parse(source, str(file))
    except SyntaxError as error:
        return [], f"SyntaxError: {error.msg}, line {error.lineno}"
    except (ValueError, RecursionError) as error:  # the file has null bytes or nests too deeply
        return [], f"{type(error).__name__}: {error}".replace("\n", " ")
    entries, problem = [], None
    for definition in _definitions(tree):
        for decorator in definition.decorator_list:
            match decorator:
                case ast.Call(
                    func=ast.Attribute(attr=attribute, value=ast.Name("registry") | ast.Attribute(_, "registry"))
                ):
                    kind = attribute.removeprefix("register_")
                    match decorator.args:
                        case [ast.Constant(value=str(name))] if attribute == f"register_{kind}" and kind in KINDS:
                            summary = (ast.get_docstring(definition) or "").partition("\n")[0]
                            entries.append(Entry(kind, name, file, definition.lineno, summary, module))
                        case _:
                            problem = f"line {decorator.lineno}: {_complaint(attribute, kind)}"
    return entries, problem


def _definitions(tree: ast.Module) -> Iterator[ast.ClassDef | ast.FunctionDef]:
    """Yield all classes and functions of a file; much faster than `ast.walk`, which also visits expressions."""
    waiting: deque[ast.AST] = deque([tree])
    while waiting:
        for child in ast.iter_child_nodes(waiting.popleft()):
            if isinstance(child, ast.ClassDef | ast.FunctionDef):
                yield child
            if isinstance(child, ast.stmt | ast.excepthandler | ast.match_case):
                waiting.append(child)


def _complaint(attribute: str, kind: str) -> str:
    if kind in KINDS:
        return f"{attribute} takes one literal string, because the name is read without running the file"
    hint = did_you_mean(attribute, [f"register_{k}" for k in KINDS])
    return f"registry has no {attribute}" + (f"; {hint}" if hint else "")


registry = Registry()
sys.meta_path.append(registry)
