"""Options of plugins that are not imported: their definitions alone are run, and what these refer to.

Plugins import torch and more, which takes seconds. A mistake in a project file is told before that.
"""

from __future__ import annotations

import ast
import builtins
import sys
from collections.abc import Iterable, Iterator
from copy import copy
from importlib import import_module
from importlib.util import resolve_name
from os.path import relpath
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from crosstrain.config.registry import find_without_importing, registry
from crosstrain.config.schema import Checker, Key, NoOptions, defaults, options_class
from crosstrain.utils.errors import UserError


class Unread(UserError):
    """A check that needs an import. It tells nothing, because the full check follows."""

    @property
    def sentences(self) -> list[str]:
        return []


class AheadChecker(Checker):
    """A checker that imports a plugin only where its options cannot be read from its source."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.sources: dict[str, _Source] = {}  # by module
        self.defines = False  # options are being defined, in contrast to their methods being run
        self._classes: dict[tuple[str, str], type] = {}

    def options_class(self, kind: str, name: str, others: Iterable[str] = ()) -> type:
        if (kind, name) not in self._classes:
            self._classes[kind, name] = self._read(kind, name) or super().options_class(kind, name, others)
        return self._classes[kind, name]

    def _read(self, kind: str, name: str) -> type | None:
        owners = [entry for entry in registry.entries(kind) if entry.name == name]
        if len(owners) != 1 or owners[0].module in sys.modules:
            return None
        self.defines = True
        try:
            found = options_class(kind, _Source.of(owners[0].module, owners[0].file, self).component(owners[0].line))
            defaults(found)
            return found
        except Exception:  # of any kind; the import tells what is wrong
            return None
        finally:
            self.defines = False

    def dataclass(self, cls: Any, value: Any, key: Key) -> Any:
        try:
            return super().dataclass(cls, value, key)
        except UserError:
            raise
        except Exception as error:  # __post_init__ may use what only the imported module has
            raise Unread from error


class _Source(dict[str, Any]):
    """The names of a module, each defined when it is first asked for.

    It is the `__builtins__` of the module's code, in which Python looks for names that are not defined yet.
    """

    def __init__(self, module: str, file: Path, checker: AheadChecker) -> None:
        super().__init__(__import__=self._import)
        self.module, self.file, self.checker = module, file, checker
        self.package = module if file.name == "__init__.py" else module.rpartition(".")[0]
        self.globals = {"__builtins__": self, "__name__": module}
        self.statements: dict[str, list[ast.stmt]] = {}
        for name, statement in _definitions(ast.parse(file.read_bytes()).body):
            self.statements.setdefault(name, []).append(statement)

    @classmethod
    def of(cls, module: str, file: Path, checker: AheadChecker) -> _Source:
        if module not in checker.sources:
            checker.sources[module] = cls(module, file, checker)
        return checker.sources[module]

    def component(self, line: int) -> Any:
        """Return a stand-in for the component that is defined at a line."""
        name, definition = next((n, s) for n, found in self.statements.items() for s in found if s.lineno == line)
        if not all(map(_registers, getattr(definition, "decorator_list", ()))):  # another one may change the options
            raise Unread
        return SimpleNamespace(Options=self.options(name), __module__=self.module, __qualname__=name)

    def options(self, name: str) -> Any:
        """Return the options that a class or function has. Raises Unread where only an import can tell."""
        if f"{name}.Options" in self.statements:
            raise Unread
        match self.statements[name]:
            case [ast.FunctionDef()]:
                return NoOptions
            case [ast.ClassDef() as node] if own := _own_options(node):
                return self._run(own, {})["Options"]
            case [ast.ClassDef(bases=bases)] if all(isinstance(base, ast.Name) for base in bases):
                inherited = [self.options(ast.unparse(base)) for base in bases]
                return next((found for found in inherited if found is not NoOptions), NoOptions)
            case [ast.ImportFrom(module, [ast.alias(base)], level)]:
                home = self._home(module or "", level)
                known = isinstance(home, _Source)
                return home.options(base) if known else getattr(getattr(home, base), "Options", NoOptions)
        raise Unread

    def __missing__(self, name: str) -> Any:
        if name in (loaded := getattr(sys.modules.get(self.module), "__dict__", {})):
            return loaded[name]
        if name not in self.globals:
            if name not in self.statements:
                return getattr(builtins, name)
            for statement in self.statements[name]:
                if isinstance(statement, ast.ClassDef) and _own_options(statement):
                    self.globals[name] = SimpleNamespace(Options=self.options(name))
                else:
                    self._run(statement, self.globals)
        return self.globals[name]

    def _run(self, statement: ast.stmt, names: dict[str, Any]) -> dict[str, Any]:
        """Run a statement without functions' types, and register nothing; returns `names`, with what it defines."""
        for node in ast.walk(statement):
            if isinstance(node, ast.arg):
                node.annotation = None
            elif isinstance(node, (ast.ClassDef, ast.FunctionDef)):
                node.decorator_list = [each for each in node.decorator_list if not _registers(each)]
                if isinstance(node, ast.FunctionDef):
                    node.returns = None
        code = compile(ast.Module([statement], []), self.file, "exec", dont_inherit=True)
        exec(code, self.globals, names)
        return names

    def _import(self, name: str, _: Any = None, __: Any = None, names: Iterable[str] = (), level: int = 0) -> Any:
        """Import for the module's code, which is given one name at a time."""
        home = self._home(name, level)
        if isinstance(home, _Source):
            return SimpleNamespace(**{each: home[each] for each in names})
        return home if names else import_module(name.partition(".")[0])

    def _home(self, name: str, level: int) -> Any:
        """Return a module that is there or Python's own; of any other in a package its source, which costs less."""
        name = resolve_name("." * level + name, self.package)
        top, own = name.partition(".")[0], self.module.partition(".")[0]
        is_ours = top in (own, __name__.partition(".")[0])
        if not is_ours and (top in sys.stdlib_module_names or name in sys.modules):
            return import_module(name)
        if not is_ours and not self.checker.defines:
            raise Unread
        if not is_ours and top == name:
            return import_module(name)
        return _Source.of(name, self._file(name), self.checker)

    def _file(self, name: str) -> Path:
        if name.partition(".")[0] != self.module.partition(".")[0]:
            spec = find_without_importing(name)
            return Path((spec and spec.origin) or "")
        from_here = relpath(name.replace(".", "/"), self.package.replace(".", "/"))
        path = self.file.parent / from_here  # as a folder of plugins is not on Python's path
        return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def _registers(decorator: ast.expr) -> bool:
    return "registry.register_" in ast.unparse(decorator)


def _own_options(node: ast.ClassDef) -> ast.stmt | None:
    """Return the statement in a class that gives it options of its own."""
    return next((statement for name, statement in _definitions(node.body) if name == "Options"), None)


def _definitions(body: Iterable[ast.stmt]) -> Iterator[tuple[str, ast.stmt]]:
    """Yield each name that statements define, with the statement; what they import is one statement for each name."""
    for statement in body:
        if isinstance(statement, ast.If) and ast.unparse(statement.test) == "TYPE_CHECKING":
            yield from _definitions(statement.body)
        elif isinstance(statement, (ast.Import, ast.ImportFrom)):
            for alias in statement.names:
                one = copy(statement)
                one.names = [alias]
                yield alias.asname or alias.name.partition(".")[0], one
        elif isinstance(statement, (ast.ClassDef, ast.FunctionDef)):
            yield statement.name, statement
        else:
            for node in ast.walk(statement):
                if isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Store):
                    yield ast.unparse(node), statement
