"""Arrows point one way, and nothing is imported before it is needed."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grimp
import pytest

from conftest import ENVIRONMENT, ROOT
from fixtures_ranks import run_ranks

CORE = ROOT / "platform" / "crosstrain"
PLUGINS = ROOT / "plugins"


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield "." * node.level + (node.module or "")


TRAIN_PATH = {
    "training", "engine", "data", "modeling", "checkpoint", "config", "distributed", "monitor", "utils", "inference",
}  # fmt: skip


def broken(source: Path) -> list[str]:
    """The contracts of pyproject.toml that the package `crosstrain` in this folder breaks."""
    lint = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    done = subprocess.run(
        [sys.executable, "-c", lint, "--config", str(ROOT / "pyproject.toml"), "--no-cache"],
        env=ENVIRONMENT | {"PYTHONPATH": str(source)},
        capture_output=True,
        text=True,
    )
    kept = re.findall(r"^(.+) (KEPT|BROKEN)", done.stdout, re.MULTILINE)
    assert len(kept) == 2, done.stdout + done.stderr
    return [name for name, result in kept if result == "BROKEN"]


def test_the_core_is_packages_whose_imports_point_down() -> None:
    assert broken(CORE.parent) == []


@pytest.mark.parametrize(
    ("file", "planted"),
    [
        ("utils/units.py", "from crosstrain.engine.runner import Runner"),
        ("data/dataset.py", "from crosstrain.checkpoint import boxes"),
        ("engine/runner.py", "def f():\n    from crosstrain.training import trainer"),
        ("engine/optimizer.py", "from crosstrain.engine.build import build_model"),
    ],
)
def test_a_planted_import_breaks_the_contract(tmp_path: Path, file: str, planted: str) -> None:
    core = shutil.copytree(CORE, tmp_path / "crosstrain", ignore=shutil.ignore_patterns("__pycache__"))
    with open(core / file, "a") as out:
        out.write(f"\n{planted}\n")
    assert broken(tmp_path) != []


def test_training_needs_no_room_for_tools() -> None:
    graph = grimp.build_graph("crosstrain", exclude_type_checking_imports=True, cache_dir=None)
    needed = graph.find_upstream_modules("crosstrain.training.worker")
    assert {module.split(".")[1] for module in needed if "." in module} <= TRAIN_PATH


def test_platform_is_a_source_root_and_not_a_package() -> None:
    assert not (ROOT / "platform" / "__init__.py").exists()


def test_the_core_imports_nothing_from_plugins() -> None:
    for path in CORE.rglob("*.py"):
        found = [name for name in imports(path) if name.split(".")[0] in ("plugins", "crosstrain_plugins")]
        assert not found or path == CORE / "__init__.py", path  # a table of names, which are imported on demand


def test_the_core_names_no_plugin() -> None:
    from crosstrain.config.registry import KINDS, registry

    allowed = {"text", "chat"}  # an English word and a program before they are datasets
    packages = {"optional_deps.py", "flight_recorder.py"}  # name packages, one of which a runner is called after
    defaults = {"ddp", "causal_lm", "adamw", "cosine", "jsonl", "tensorboard"}  # of keys that nothing sets
    notation = {"megatron"}  # of log lines, before it is a runner
    hooks = {"profile", "stragglers", "prompt_samples", "digests"}  # of every run
    names = {name for kind in KINDS if kind != "command" for name in registry.names(kind)} - allowed
    allowed_in = {"run_options.py": defaults | notation, "log_lines.py": notation}
    allowed_in |= {"hook_order.py": hooks, "run_folder.py": hooks}
    for path in (p for p in CORE.rglob("*.py") if p.name not in packages):
        strings = {n.value for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Constant)}
        own = {
            "run_options.py": defaults | notation,
            "log_lines.py": notation,
            "hook_order.py": hooks,
            "run_folder.py": hooks,
        }.get(path.name, set())
        assert not (strings & names) - own, path


def test_plugins_import_each_other_across_kinds_only_from_prepare() -> None:
    """Verbs may use each other. Readers, document processors and datasets that prepare text are parts of `prepare`."""
    for path in PLUGINS.rglob("*.py"):
        folders = path.relative_to(PLUGINS).parts[:-1]
        outward = "." * (len(folders) + 1)  # leads out of the folder of its kind
        others = [n for n in imports(path) if n.startswith(("plugins", "crosstrain_plugins", outward))]
        far = [n for n in others if not re.match(r"\.+commands\.prepare\b", n)]
        assert not far or folders[0] == "commands", path


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
                assert not deep & {f"{module}.{name}" for name, module in crosstrain.homes().items()}, path


def test_every_public_name_exists() -> None:
    import crosstrain

    assert {"registry", "Runner", "Model", "Dataset", "Tracker", "ConfigError"} <= set(dir(crosstrain))
    for name in crosstrain.__all__:
        assert getattr(crosstrain, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'Rnner'"):
        crosstrain.Rnner  # noqa: B018


@pytest.mark.parametrize(("page", "least"), [("ARCHITECTURE.md", 40), ("docs/code-map.md", 60)])
def test_the_pages_about_the_code_name_files_that_exist(page: str, least: int) -> None:
    named = set(re.findall(r"`((?:[a-z_0-9]+/)*[a-z_0-9]+\.py)`", (ROOT / page).read_text()))
    assert len(named) > least
    there = [name for home in (ROOT, CORE) for name in named if (home / name).exists()]
    beside = [name for name in named if "/" not in name and [*PLUGINS.rglob(name)]]  # named after its folder
    assert named - {*there, *beside} == set()


def statements(path: Path) -> int:
    """Statements of a file, without docstrings."""
    nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.stmt)]
    return sum(not (isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant)) for n in nodes)


def the_way() -> list[tuple[str, int]]:
    """Files and their statements, as ARCHITECTURE.md lists them from `train.py` to the first update."""
    page = (ROOT / "ARCHITECTURE.md").read_text()
    section = page.partition("## Reading the code")[2].partition("\n## ")[0]
    return [(name, int(count)) for name, count in re.findall(r"\| \d+ \| `(\S+)` \| (\d+) \|", section)]


def test_the_way_to_the_first_update_is_short_and_counted() -> None:
    way = the_way()
    assert next(name for name, _ in way) == "train.py"
    assert len(way) <= 10
    assert sum(count for _, count in way) <= 1600
    homes = {name: next(home / name for home in (ROOT, CORE) if (home / name).exists()) for name, _ in way}
    assert {name: statements(path) for name, path in homes.items()} == dict(way)
    for number, (name, _) in enumerate(way[1:], 1):  # some file before it imports it
        module = f"crosstrain.{name.removesuffix('.py').replace('/', '.')}"
        package, _, last = module.rpartition(".")
        before = "".join(homes[earlier].read_text() for earlier, _ in way[:number])
        known = rf"(from {re.escape(module)} import|from {re.escape(package)} import .*\b{last}\b)"
        assert re.search(known, before) or package == "crosstrain.cli", name  # verbs are imported by name


@pytest.mark.parametrize("package", ["training", "engine"])
def test_functions_fit_on_a_screen(package: str) -> None:
    for path in (CORE / package).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                assert node.end_lineno - node.lineno < 50, f"{path.name}: {node.name}"


def test_a_runner_has_at_most_24_public_members() -> None:
    from crosstrain import Runner

    assert len([name for name in dir(Runner) if not name.startswith("_")]) <= 24


def test_a_model_has_at_most_20_public_members() -> None:
    from torch import nn

    from crosstrain import Model

    class Least(Model):
        def forward(self, **batch: object) -> None: ...

        def blocks(self) -> list[nn.Module]:
            return []

    own = {name for name in {*dir(Least(None)), "forward"} - (set(dir(nn.Module())) - {"forward"})}
    assert len([name for name in own if not name.startswith("_")]) <= 20


def test_plugins_of_others_use_public_names_only() -> None:
    files = [path for path in (ROOT / "tests" / "plugins_of_others").glob("*.py") if not path.name.startswith("test_")]
    assert len(files) >= 2
    for path in files:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("crosstrain"):
                assert node.module == "crosstrain", path
    lines = {path.name: len(path.read_text().splitlines()) for path in files}
    assert lines["grpo.py"] <= 150
    assert lines["native_image_text.py"] <= 120


def imported_by(program: str) -> set[str]:
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            f"import sys; sys.path.insert(0, {str(ROOT / 'platform')!r})\n{program}\nprint('MODULES', *sys.modules)",
        ],
        capture_output=True,
        text=True,
        env=ENVIRONMENT,
        check=True,
    )
    return set(done.stdout.split("MODULES")[1].split())


def test_listing_imports_no_plugin_and_no_torch() -> None:
    loaded = imported_by("from crosstrain.cli.main import main; assert main(['list']) == 0")
    assert not loaded & {"torch", "transformers", "numpy"}
    assert not {name for name in loaded if name.startswith("crosstrain_plugins.builtin.")}


def test_listing_the_options_of_a_component_imports_it_alone() -> None:
    loaded = imported_by("from crosstrain.cli.main import main; main(['list', 'lr_scheduler', 'cosine'])")
    files = {name for name in loaded if name.startswith("crosstrain_plugins.builtin.") and name.count(".") > 2}
    assert files == {"crosstrain_plugins.builtin.lr_schedulers.cosine"}
    assert not loaded & {"torch", "transformers", "numpy"}


def test_the_package_alone_imports_nothing_of_its_own() -> None:
    assert not {name for name in imported_by("import crosstrain") if name.startswith("crosstrain.")}


def test_naming_a_runner_imports_that_runner_alone() -> None:
    loaded = imported_by("from crosstrain.config.registry import registry; registry.get('runner', 'ddp')")
    assert "crosstrain_plugins.builtin.runners.ddp" in loaded
    assert not loaded & {"deepspeed", "transformers", "fairscale", "crosstrain_plugins.builtin.models.gpt2"}


def imported() -> bool:
    return {"transformers", "crosstrain.training.worker"} <= sys.modules.keys()


def test_the_ranks_of_tests_start_with_everything_imported() -> None:
    assert run_ranks(1, imported) == [True]
