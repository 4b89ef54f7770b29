"""Arrows point one way, and nothing is imported before it is needed."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from conftest import ENVIRONMENT, ROOT

CORE = ROOT / "platform" / "crosstrain"
PLUGINS = ROOT / "plugins"


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield "." * node.level + (node.module or "")


def test_platform_is_a_source_root_and_not_a_package() -> None:
    assert not (ROOT / "platform" / "__init__.py").exists()


def test_the_core_imports_nothing_from_plugins() -> None:
    for path in CORE.rglob("*.py"):
        assert not [name for name in imports(path) if name.split(".")[0] in ("plugins", "crosstrain_plugins")], path


def test_the_core_names_no_plugin() -> None:
    from crosstrain.config.plugin_scan import KINDS
    from crosstrain.config.registry import registry

    allowed = {"text"}  # an English word before it is a dataset
    packages = {"optional_deps.py", "flight_recorder.py"}  # name packages, one of which a runner is called after
    defaults = {"ddp", "adamw", "cosine", "jsonl", "tensorboard"}  # what a project file that says nothing gets
    names = {name for kind in KINDS for name in registry.names(kind)} - allowed
    for path in (p for p in CORE.rglob("*.py") if p.name not in packages):
        strings = {n.value for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Constant)}
        assert not (strings & names) - (defaults if path.name == "run_options.py" else set()), path


def test_plugins_do_not_import_each_other_across_kinds() -> None:
    for path in PLUGINS.rglob("*.py"):
        assert not [n for n in imports(path) if n.startswith(("plugins", "crosstrain_plugins", ".."))], path


@pytest.mark.parametrize("folder", [CORE, PLUGINS])
def test_files_are_read_in_one_sitting(folder: Path) -> None:
    long = {str(p): n for p in folder.rglob("*.py") if (n := len(p.read_text().splitlines())) > 500}
    assert not long


def test_plugins_import_public_names_from_the_package_itself() -> None:
    import crosstrain

    for path in [*PLUGINS.rglob("*.py"), *(ROOT / "tests" / "third_party").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("crosstrain."):
                deep = {f"{node.module}.{alias.name}" for alias in node.names}
                assert not deep & {f"{module}.{name}" for name, module in crosstrain._HOMES.items()}, path


def test_every_public_name_exists() -> None:
    import crosstrain

    assert {"registry", "Runner", "Model", "Dataset", "Tracker", "ConfigError"} <= set(dir(crosstrain))
    for name in crosstrain.__all__:
        assert getattr(crosstrain, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'Rnner'"):
        crosstrain.Rnner  # noqa: B018


def imported_by(program: str) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(ROOT / 'platform')!r})\n{program}\n"
         "print('MODULES', *sys.modules)"],
        capture_output=True, text=True, env=ENVIRONMENT, check=True,
    )  # fmt: skip
    return set(done.stdout.split("MODULES")[1].split())


def test_listing_imports_no_plugin_and_no_torch() -> None:
    loaded = imported_by("from crosstrain.cli.main import main; assert main(['list']) == 0")
    assert not loaded & {"torch", "transformers", "numpy"}
    assert not {name for name in loaded if name.startswith("crosstrain_plugins.builtin.")}


def test_the_package_alone_imports_nothing_of_its_own() -> None:
    assert not {name for name in imported_by("import crosstrain") if name.startswith("crosstrain.")}


def test_naming_a_runner_imports_that_runner_alone() -> None:
    loaded = imported_by("from crosstrain.config.registry import registry; registry.get('runner', 'ddp')")
    assert "crosstrain_plugins.builtin.runners.ddp" in loaded
    assert not loaded & {"deepspeed", "transformers", "fairscale", "crosstrain_plugins.builtin.models.gpt2"}
