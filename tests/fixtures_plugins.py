"""A home for one test: plugins/ and configs/ in a temporary folder, a registry that knows nothing else."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from crosstrain_plugins.builtin.commands.migrate.foreign_keys import origins

from crosstrain.config.registry import ENVIRONMENT, PACKAGE, Registry, registry
from crosstrain.utils import paths


def write(folder: Path, files: dict[str, str]) -> Path:
    """Put files, given as name -> text, under `folder`."""
    for name, text in files.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    return folder


def plugin(kind: str, name: str, body: str = "pass", before: str = "") -> str:
    """Source of a plugin file with one component."""
    return f'''from crosstrain import registry
{before}

@registry.register_{kind}("{name}")
class Component:
    """What {name} does.

    More about it.
    """

    {body}
'''


def of_plugins() -> list[str]:
    """Names of the imported modules that register components."""
    verbs = {"crosstrain.cli.train", "crosstrain.cli.evaluate", "crosstrain.cli.list"}
    return [name for name in sys.modules if name.partition(".")[0] == PACKAGE or name in verbs]


def forget_plugins() -> None:
    """Be like a new process: nothing registered, no plugin imported."""
    registry.__dict__ = vars(Registry())
    for name in of_plugins():
        del sys.modules[name]


def isolate(monkeypatch: pytest.MonkeyPatch, home: Path) -> Iterator[Path]:
    """Body of a fixture: the working directory and home are `home`, and nothing is registered."""

    monkeypatch.setattr(registry, "__dict__", {})
    for name in of_plugins():
        monkeypatch.delitem(sys.modules, name)
    forget_plugins()
    monkeypatch.setattr(paths, "home", lambda: home)
    monkeypatch.delenv(ENVIRONMENT, raising=False)
    monkeypatch.chdir(home)
    origins.cache_clear()
    yield home
    origins.cache_clear()  # which are of this home
    forget_plugins()
