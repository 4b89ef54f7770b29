"""Checks without torch, in a forked process with stand-ins for libraries that take long to import.

Plugins import torch and other libraries, which takes seconds. With these checks, most mistakes in a project file are
reported earlier.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any, ClassVar

from crosstrain.config.registry import KINDS, PACKAGE, registry
from crosstrain.config.schema import Checker, Key
from crosstrain.utils.errors import UserError

_LIGHT = {"pydantic", "pydantic_core", "typing_extensions", "typing_inspection", *sys.stdlib_module_names}


class Unread(UserError):
    """A check that depends on a stand-in. It reports nothing, because the full check follows."""

    @property
    def sentences(self) -> list[str]:
        return []


def apart(function: Callable[[], Any]) -> Any:
    """Return the result of `function`, as JSON, from a forked process with stand-ins; None if that process fails."""
    stand_ins = _StandIns()  # scans the plugin sources for both processes
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        try:
            for output in (1, 2):  # discard the output: the full check runs the same code again
                os.dup2(os.open(os.devnull, os.O_WRONLY), output)
            sys.meta_path.insert(0, stand_ins)
            with open(writer, "w", encoding="utf-8") as pipe:
                json.dump(function(), pipe)
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader, encoding="utf-8") as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    return json.loads(text or "null")


class AheadChecker(Checker):
    """A checker for a process with stand-ins. It ignores errors in plugins, as the stand-ins may have caused them."""

    def options_class(self, kind: str, name: str, others: Iterable[str] = ()) -> type:
        if [entry.name for entry in registry.entries(kind)].count(name) != 1:  # unknown, or registered twice
            return super().options_class(kind, name, others)
        _StandIn.defining = True
        try:
            found = super().options_class(kind, name, others)
        except Exception as error:
            raise Unread from error
        finally:
            _StandIn.defining = False
        return found

    def dataclass(self, cls: Any, value: Any, key: Key) -> Any:
        try:
            return super().dataclass(cls, value, key)
        except UserError:
            raise
        except Exception as error:  # __post_init__ may compute with a stand-in
            raise Unread from error


class _StandIn:
    """Stand-in for anything in a library that is not imported. Definitions may use it; checks on it raise Unread."""

    defining: ClassVar = False  # True while modules are imported

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self.__dict__.setdefault(name, _StandIn())

    def __call__(self, *_: Any, **__: Any) -> _StandIn:
        return _StandIn()

    def __mro_entries__(self, _: Any) -> tuple[type, ...]:
        return (_Base,)

    def __eq__(self, other: object = None) -> bool:
        if not _StandIn.defining:
            raise Unread
        return self is other

    def __iter__(self) -> Iterator[Any]:
        if not _StandIn.defining:
            raise Unread
        return iter(())

    def __repr__(self) -> str:
        raise Unread

    __getitem__ = __or__ = __ror__ = __call__
    __bool__ = __lt__ = __le__ = __gt__ = __ge__ = __contains__ = __eq__
    __hash__ = object.__hash__


class _Base:
    """A base class from a library that is not imported. The real class may have `Options`."""

    Options: ClassVar = _StandIn()


class _StandIns:
    """A finder and loader of stand-ins for libraries that are neither loaded nor light.

    A library's module with pydantic models is imported without its package, because plugins may build options from
    them.
    """

    def __init__(self) -> None:
        modules = [PACKAGE, *sys.modules, *(entry.module for kind in KINDS for entry in registry.entries(kind))]
        self._real = _LIGHT | {name.partition(".")[0] for name in modules}

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if name.partition(".")[0] in self._real or name.startswith("_"):
            return None
        found = PathFinder.find_spec(name, path)
        file = Path((found and found.origin) or "")
        if file.suffix == ".py" and file.name != "__init__.py" and b"pydantic" in file.read_bytes():
            return found
        spec = ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]
        spec.submodule_search_locations = (found and found.submodule_search_locations) or []
        return spec

    def create_module(self, _: ModuleSpec) -> _StandIn:
        return _StandIn()

    def exec_module(self, _: Any) -> None: ...
