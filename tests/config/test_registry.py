"""Names to components: found by reading, imported one at a time, broken one at a time."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from conftest import ROOT
from crosstrain.config.registry import KINDS, registry
from crosstrain.utils import paths
from crosstrain.utils.errors import ConfigError, UserError
from crosstrain.utils.optional_deps import EXTRAS
from fixtures_plugins import forget_plugins, isolate, plugin, write

EXPLODES = "raise RuntimeError('this file was imported')"


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    yield from isolate(monkeypatch, tmp_path)


def plugins(home: Path, **files: str) -> Path:
    """Write built-in plugin files, given by module name."""
    return write(home / "plugins", {f"{name}.py": text for name, text in files.items()})


def complaint(kind: str, name: str, expected: type[UserError] = ConfigError) -> str:
    with pytest.raises(expected) as caught:
        registry.get(kind, name)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# ---- finding


def test_reading_finds_what_decorators_say_and_imports_nothing(home: Path) -> None:
    plugins(home, fast=plugin("runner", "fast", before=EXPLODES))
    (entry,) = registry.entries("runner")
    assert (entry.kind, entry.name, entry.summary) == ("runner", "fast", "What fast does.")
    assert entry.file == home / "plugins" / "fast.py"
    assert entry.file.read_text().splitlines()[entry.line - 1] == "class Component:"


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_has_a_decorator_and_a_look_up(home: Path, kind: str) -> None:
    plugins(home, it=plugin(kind, "it"))
    assert registry.get(kind, "it").__name__ == "Component"
    assert set(registry.names(kind)) == {"it"} | ({"train", "evaluate", "list"} if kind == "command" else set())
    assert {k for k in KINDS if registry.names(k)} == {kind, "command"}


def test_functions_and_definitions_under_a_condition_are_found(home: Path) -> None:
    source = """
from crosstrain import registry
try:
    import no_such_package
except ImportError:
    @registry.register_lr_scheduler("flat")
    def flat(step):
        "Stays."
        return 1.0
if True:
    @registry.register_lr_scheduler("zero")
    def zero(step):
        return 0.0
"""
    plugins(home, flat=source)
    assert [entry.summary for entry in registry.entries("lr_scheduler")] == ["Stays.", ""]
    assert registry.get("lr_scheduler", "flat")(3) == 1.0
    assert registry.get("lr_scheduler", "zero")(3) == 0.0


def test_a_qualified_decorator_is_found_and_a_foreign_one_is_not(home: Path) -> None:
    imports = ("from crosstrain import registry", "import crosstrain")
    qualified = plugin("runner", "a").replace(*imports)
    plugins(home, a=qualified.replace("@registry", "@crosstrain.registry"))
    plugins(home, b=plugin("runner", "b").replace("@registry", "@app"))
    assert registry.names("runner") == ["a"]
    assert registry.broken == {}


def test_subfolders_count_and_hidden_and_compiled_ones_do_not(home: Path) -> None:
    names = [
        "__init__.py",
        "runners/__init__.py",
        "runners/deep/er.py",
        ".git/x.py",
        "__pycache__/y.py",
        ".z.py",
    ]
    write(home / "plugins", {name: plugin("runner", f"runner {i}") for i, name in enumerate(names)})
    assert registry.names("runner") == ["runner 0", "runner 1", "runner 2"]
    for name in registry.names("runner"):
        registry.get("runner", name)


def test_entries_are_sorted_by_name(home: Path) -> None:
    plugins(home, a=plugin("model", "zebra"), b=plugin("model", "ant"))
    assert [entry.name for entry in registry.entries("model")] == registry.names("model") == ["ant", "zebra"]


def test_a_component_registered_by_running_code_is_found_too(home: Path) -> None:
    @registry.register_dataset("in a notebook")
    class Cell:
        pass

    assert registry.get("dataset", "in a notebook") is Cell
    assert registry.names("dataset") == ["in a notebook"]


# ---- importing


def test_only_the_module_that_is_asked_for_is_imported(home: Path) -> None:
    plugins(home, fast=plugin("runner", "fast"), sibling=plugin("runner", "sibling", before=EXPLODES))
    found = registry.get("runner", "fast")
    assert found is registry.get("runner", "fast")
    assert found.__module__ == "crosstrain_plugins.builtin.fast"
    assert "crosstrain_plugins.builtin.sibling" not in sys.modules


def test_modules_of_a_folder_import_each_other_relatively(home: Path) -> None:
    user = plugin("model", "user", "value = helper.VALUE", before="from .parts import helper")
    write(home / "plugins", {"user.py": user, "parts/helper.py": "VALUE = 7"})
    assert registry.get("model", "user").value == 7


def test_a_folder_with_an_init_runs_it_first(home: Path) -> None:
    user = plugin("model", "user", "value = VALUE", before="from . import VALUE")
    write(home / "plugins", {"__init__.py": "VALUE = 7", "user.py": user})
    assert registry.get("model", "user").value == 7


def test_an_init_that_fails_breaks_its_own_folder_only(home: Path) -> None:
    plugins(home, fine=plugin("model", "fine"))
    registry.add_folder(write(home / "other", {"__init__.py": EXPLODES, "lost.py": plugin("model", "lost")}))
    for _ in range(2):  # the second look-up must not find half a package
        assert "RuntimeError: this file was imported" in complaint("model", "lost")
    assert registry.get("model", "fine")


def test_equal_file_names_in_two_folders_do_not_collide(home: Path) -> None:
    for folder, name in [("one/mine", "first"), ("two/mine", "second")]:
        write(home / folder, {"net.py": plugin("model", name)})
        registry.add_folder(home / folder)
    assert registry.get("model", "first") is not registry.get("model", "second")
    assert registry.get("model", "second").__module__ == "crosstrain_plugins.mine_2.net"


def test_objects_of_plugin_classes_can_be_pickled(home: Path) -> None:
    plugins(home, data=plugin("dataset", "data"))
    thing = registry.get("dataset", "data")()
    assert type(pickle.loads(pickle.dumps(thing))) is type(thing)


# ---- what goes wrong


def test_an_unknown_name_lists_what_exists_and_what_is_close(home: Path) -> None:
    plugins(home, a=plugin("runner", "megatron"), b=plugin("runner", "ddp"), c=plugin("model", "megatran"))
    assert complaint("runner", "megatorn") == (
        "there is no runner called 'megatorn'; did you mean megatron?; known: ddp, megatron"
    )
    assert complaint("dataset", "x") == "there is no dataset called 'x'; known: none"


def test_an_unknown_name_says_which_plugins_failed_and_why(home: Path) -> None:
    plugins(
        home,
        typo="def broken(registry.register_model:\n",
        crash=plugin("runner", "crash", before="1 / 0"),
        fine=plugin("runner", "fine"),
    )
    assert "ZeroDivisionError: division by zero" in complaint("runner", "crash")
    message = complaint("runner", "nothing")
    assert "plugins/typo.py (SyntaxError: invalid syntax, line 1)" in message
    assert "plugins/crash.py (ZeroDivisionError: division by zero)" in message
    assert set(registry.broken) == {home / "plugins" / "typo.py", home / "plugins" / "crash.py"}
    assert registry.get("runner", "fine")


@pytest.mark.parametrize("content", [b"x = '\xff'", b"x = 1\0", b"x = (", b"# coding: nonsense\nx = 1"])
def test_a_file_that_cannot_be_read_breaks_only_itself(home: Path, content: bytes) -> None:
    plugins(home, fine=plugin("runner", "fine"))
    (home / "plugins" / "bad.py").write_bytes(content + b"  # registry.register_runner")
    assert registry.get("runner", "fine")
    assert list(registry.broken) == [home / "plugins" / "bad.py"]


def test_a_name_that_is_not_literal_is_reported(home: Path) -> None:
    plugins(home, it=plugin("runner", "fast").replace('"fast"', "NAME"))
    assert "line 4: register_runner takes one literal string" in complaint("runner", "fast")


def test_a_misspelled_decorator_is_reported(home: Path) -> None:
    plugins(home, it=plugin("rnner", "fast"))
    assert "registry has no register_rnner; did you mean register_runner?" in complaint("runner", "fast")


def test_a_decorator_that_does_not_run_is_reported(home: Path) -> None:
    plugins(home, it=plugin("runner", "fast").replace("\n@", "\nif False:\n  @").replace("\nclass", "\n  class"))
    assert "was not registered when its file was imported" in complaint("runner", "fast")


@pytest.mark.parametrize("package", sorted(EXTRAS))
def test_a_missing_dependency_names_the_extra_that_brings_it(
    home: Path, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    monkeypatch.setattr("crosstrain.config.registry.importlib.util.find_spec", lambda _name: None)
    before = f"raise ModuleNotFoundError(\"No module named '{package}.sub'\", name='{package}.sub')"
    plugins(home, it=plugin("model", "needy", before=before))
    message = complaint("model", "needy", UserError)
    assert "model 'needy' (plugins/it.py)" in message
    assert package in message
    assert f"pip install 'crosstrain[{EXTRAS[package]}]'" in message


def test_a_missing_dependency_without_an_extra_is_named_itself(home: Path) -> None:
    plugins(home, it=plugin("model", "needy", before="import no_such_package.inside"))
    assert "pip install no_such_package" in complaint("model", "needy", UserError)


@pytest.mark.parametrize("line", ["from .nowhere import x", "import json.nowhere", "from json import nowhere"])
def test_a_mistaken_import_is_not_taken_for_a_missing_package(home: Path, line: str) -> None:
    plugins(home, it=plugin("model", "needy", before=line))
    message = complaint("model", "needy")
    assert "nowhere" in message
    assert "pip install" not in message


def test_a_name_claimed_twice_names_both_files_the_first_owner_first(home: Path) -> None:
    plugins(home, ours=plugin("runner", "ddp"), other=plugin("runner", "fine"))
    registry.add_folder(write(home / "more", {"theirs.py": plugin("runner", "ddp"), "new.py": plugin("runner", "new")}))
    assert complaint("runner", "ddp") == (
        "runner 'ddp' is already registered by plugins/ours.py:5, so more/theirs.py:5 must choose a different name"
    )
    assert registry.get("runner", "fine")
    assert registry.get("runner", "new")


def test_a_name_claimed_twice_in_one_file_is_an_error(home: Path) -> None:
    plugins(home, twice=plugin("runner", "x") + plugin("runner", "x"))
    assert "already registered by plugins/twice.py:5, so plugins/twice.py:16 must" in complaint("runner", "x")


def test_one_name_may_serve_two_kinds(home: Path) -> None:
    plugins(home, a=plugin("runner", "x"), b=plugin("model", "x"))
    assert registry.get("runner", "x") is not registry.get("model", "x")


def test_running_code_may_not_take_a_name_either(home: Path) -> None:
    plugins(home, ours=plugin("runner", "ddp"))
    registry.get("runner", "ddp")
    with pytest.raises(ConfigError, match=r"already registered by plugins/ours\.py, so .*test_registry\.py must"):
        registry.register_runner("ddp")(type("Mine", (), {"__module__": __name__}))


# ---- sources


def test_sources_come_in_a_fixed_order(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Built-in, environment, entry points, added folders."""
    order = ["plugins", "environment", "installed", "added"]
    for folder in order:
        write(home / folder, {f"{folder}_module.py": plugin("model", "same")})
    monkeypatch.setenv("CROSSTRAIN_PLUGINS", str(home / "environment"))
    install(monkeypatch, home / "installed", "installed_module")
    registry.add_folder(home / "added")
    owners = registry.entries("model")
    assert [entry.file.parent.name for entry in owners] == order


def test_the_environment_names_several_folders(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("one", "two"):
        write(home / name, {"it.py": plugin("model", name)})
    monkeypatch.setenv("CROSSTRAIN_PLUGINS", f"{home / 'one'}::two")  # an empty part, and a relative path
    assert registry.names("model") == ["one", "two"]
    assert registry.get("model", "two")


def test_a_missing_folder_is_an_error_that_says_who_named_it(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="nowhere: not a folder of plugins"):
        registry.add_folder(home / "nowhere")
    forget_plugins()
    monkeypatch.setenv("CROSSTRAIN_PLUGINS", "nowhere")
    for _ in range(2):
        assert complaint("model", "x") == "CROSSTRAIN_PLUGINS: nowhere: not a folder of plugins or a .py file"


def test_a_file_is_taken_alone(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(home / "mine", {"it.py": plugin("model", "it"), "other.py": plugin("model", "other")})
    (home / "mine" / "notes.txt").write_text(plugin("model", "notes"))
    monkeypatch.setenv("CROSSTRAIN_PLUGINS", "mine/it.py")
    assert registry.names("model") == ["it"]
    assert registry.get("model", "it").__module__ == "crosstrain_plugins.it"
    assert registry.folders() == [("it", home / "mine" / "it.py")]
    registry.add_folder("mine")
    assert registry.get("model", "other").__module__ == "crosstrain_plugins.mine.other"
    for named in ("mine/notes.txt", "mine/none.py"):
        with pytest.raises(ConfigError, match=r"not a folder of plugins or a \.py file"):
            registry.add_folder(named)


def test_a_folder_given_twice_or_inside_another_is_read_once(home: Path) -> None:
    write(home / "mine", {"inner/it.py": plugin("model", "it")})
    for folder in ("mine", "mine/inner", "mine/../mine"):
        registry.add_folder(folder)
    assert len(registry.entries("model")) == 1
    assert registry.get("model", "it").__module__ == "crosstrain_plugins.mine.inner.it"


def test_a_folder_may_be_labelled(home: Path) -> None:
    registry.add_folder(write(home / "mine", {"it.py": plugin("model", "it")}), label="my label")
    assert registry.get("model", "it").__module__ == "crosstrain_plugins.my_label.it"


def install(monkeypatch: pytest.MonkeyPatch, site: Path, module: str) -> None:
    """Make `site` look like site-packages with a distribution whose entry point names `module`."""
    write(
        site,
        {
            "someone-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: someone\nVersion: 1.0\n",
            "someone-1.0.dist-info/entry_points.txt": f"[crosstrain.plugins]\nsomeone = {module}\n",
        },
    )
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setattr(sys, "modules", dict(sys.modules))  # what the test imports is forgotten afterwards


def test_an_installed_package_is_read_without_being_imported(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {
        "__init__.py": "IMPORTED = True",
        "plugins/__init__.py": "",
        "plugins/net.py": plugin("model", "net"),
    }
    write(home / "site" / "someone_models", files)
    install(monkeypatch, home / "site", "someone_models.plugins")
    assert registry.names("model") == ["net"]
    assert "someone_models" not in sys.modules
    assert registry.get("model", "net").__module__ == "someone_models.plugins.net"


def test_an_installed_module_is_read(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(home / "site", {"someone_net.py": plugin("model", "net")})
    install(monkeypatch, home / "site", "someone_net")
    assert registry.get("model", "net").__module__ == "someone_net"


@pytest.mark.parametrize("module", ["someone_gone", "someone_gone.plugins", "json.gone"])
def test_an_entry_point_to_nothing_is_reported(home: Path, monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    plugins(home, fine=plugin("model", "fine"))
    install(monkeypatch, home / "site", module)
    assert registry.get("model", "fine")
    assert f"someone (the module {module} of the entry point does not exist)" in complaint("model", "other")


# ---- the real ones


def test_neither_reading_plugins_nor_the_configuration_imports_torch() -> None:
    program = """
import sys, crosstrain.config.load
from crosstrain.config.registry import KINDS, registry
assert registry.names("runner"), "no built-in runner was found"
[registry.entries(kind) for kind in KINDS]
heavy = {"torch", "numpy", "transformers", "deepspeed"} & set(sys.modules)
assert not heavy, heavy
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60, env=environment)


def test_built_in_plugins_can_be_read_and_claim_each_name_once() -> None:
    found = [entry for kind in KINDS for entry in registry.entries(kind) if paths.home() in entry.file.parents]
    names = [(entry.kind, entry.name) for entry in found]
    assert len(set(names)) == len(names)
    assert all(entry.summary for entry in found), [e for e in found if not e.summary]


# ---- paths


def test_a_file_is_looked_for_here_and_then_at_home(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(home, {"projects/a.yaml": "home", "here/projects/b.yaml": "here"})
    monkeypatch.chdir(home / "here")
    assert paths.find("projects/a.yaml") == home / "projects" / "a.yaml"
    assert paths.find("projects/b.yaml").read_text() == "here"
    write(home, {"here/projects/a.yaml": "here"})
    assert paths.find("projects/a.yaml").read_text() == "here"


def test_a_file_that_is_not_there_is_an_error_with_the_nearest_name(home: Path) -> None:
    write(home, {"projects/gpt2_345m.yaml": ""})
    with pytest.raises(
        ConfigError, match=r"^projects/gpt2_354m\.yaml: no such .*; did you mean projects/gpt2_345m\.yaml\?$"
    ):
        paths.find("projects/gpt2_354m.yaml")
    with pytest.raises(ConfigError, match=r"looked in .*/nowhere/x"):
        paths.find("nowhere/x")


def test_home_of_a_checkout_is_its_root() -> None:
    root = ROOT
    assert paths.home() == root
    assert paths.show(root / "x") in ("x", str(root / "x"))
