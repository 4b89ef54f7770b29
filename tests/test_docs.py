"""The documentation: every page is on the site, and every command, YAML block and Python block in it is right."""

from __future__ import annotations

import ast
import contextlib
import json
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml
from crosstrain_plugins.builtin.commands.prepare.command import _read_recipe

from conftest import ENVIRONMENT, ROOT, Workspace
from crosstrain.cli.main import parse
from crosstrain.config.load import load_config
from crosstrain.utils.errors import UserError
from fixtures_docs import Block, blocks, commands, is_plugin
from fixtures_plugins import isolate

VERBS = {"train.py": "train", "evaluate.py": "evaluate"}
MODULES = {"pytest", "sphinx", "venv"}
OTHERS = {  # programs that are not ours
    "apptainer", "apt-get", "cd", "cp", "docker", "enroot", "eval", "export", "kubectl", "lm_eval", "mkdir", "mypy",
    "jq", "ray", "ruff", "sky", "source", "tensorboard", "weed",
}  # fmt: skip
LAUNCHERS = {"torchrun", "srun", "mpirun", "sbatch", "deepspeed"}
FOLDERS = {path.name for path in ROOT.iterdir() if path.is_dir()} - {"data", "output", "build"}
MODEL_AND_DATA = {
    "model": {"arch": "gpt2", "model_type": "tiny"},
    "datasets": {"mine": {"name": "text", "path": "data/mine", "seq_length": 256}},
}  # beside parts of a project that name none


def entries(tree: Any) -> list[str]:
    """Every file and pattern in a part of docs/navigation.yml."""
    if isinstance(tree, list):
        return [name for item in tree for name in entries(item)]
    own = [tree[key] for key in ("root", "file", "glob") if key in tree]
    return own + entries(tree.get("subtrees", [])) + entries(tree.get("entries", []))


def test_the_navigation_of_the_site_has_every_page_once() -> None:
    named = entries(yaml.safe_load((ROOT / "docs" / "navigation.yml").read_text()))
    written = [name for name in named if not name.startswith("docs/reference/")]  # the rest is made with the site
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]
    assert sorted(written) == sorted(str(page.relative_to(ROOT).with_suffix("")) for page in pages)


def write_plugins(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    for block in filter(is_plugin, blocks("python")):
        (folder / f"{block.page.stem.replace('-', '_')}_{block.line}.py").write_text(block.text)
    with contextlib.chdir(folder):
        tutorials = [ROOT / "docs" / f"tutorial-{name}.md" for name in ("plugin", "image-dataset")]
        for block in (block for page in tutorials for block in blocks("sh", page=page)):
            for words in commands(block):
                if words[:2] == ["crosstrain", "new"] and words[2] in ("model", "processor"):
                    arguments = parse(words[1:])
                    arguments.run(arguments)
    return folder


@pytest.fixture(scope="module")
def plugins(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with the plugins that the pages show, and a registry that nothing was asked of yet."""
    folder = write_plugins(tmp_path_factory.mktemp("plugins"))
    with pytest.MonkeyPatch.context() as patch:
        for _ in isolate(patch, ROOT):
            yield folder


# ---- commands


@cache
def checkpoints() -> set[str]:
    """Folders that the projects here write."""
    return {yaml.safe_load(path.read_text())["run"]["output_dir"] for path in ROOT.glob("projects/**/*.yaml")}


def check_verb(words: list[str], plugins: Path) -> None:
    """A command of ours parses; the files that it names are here, or are the reader's; the options are accepted."""
    arguments = parse(words)
    options = [re.sub(r"^run\.plugins=.*", f"run.plugins=[{plugins}]", o) for o in getattr(arguments, "options", [])]
    path = Path(getattr(arguments, "cfg_path", None) or "mine.yaml")
    if path.stem == "mine":  # the reader's own project, checked in place of it by what every project has
        assert all(re.match(r"\w+(\.\w+)*=", option) for option in options)
    elif path.parts[0] == "configs":
        _read_recipe(arguments)
    else:
        load_config(path, options)
    if checkpoint := getattr(arguments, "checkpoint", None):
        assert checkpoint in {*checkpoints(), "output/mine", "gpt2-mine", "s3://bucket/runs/mine"}


def check_command(words: list[str], plugins: Path) -> None:
    """A program of ours gets what it understands; others are known, and what they name of the repository exists."""
    program, first, *rest = [words[0].removeprefix(".venv/bin/"), *words[1:], ""]
    if "--wrap" in words:
        check_command(shlex.split(words[words.index("--wrap") + 1]), plugins)
    elif program in LAUNCHERS:
        at = next(i for i, word in enumerate(words) if word.endswith((".py", ".sh")))
        check_verb(["train", *words[at + 1 :]], plugins)
    elif program == "crosstrain":
        check_verb(words[1:], plugins)
    elif first in VERBS:
        check_verb([VERBS[first], *words[2:]], plugins)
    elif program == "pip":
        known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        for extras in re.findall(r"(?:crosstrain|\.)\[([\w,]+)\]", " ".join(words)):
            assert set(extras.split(",")) <= set(known)
    elif program in ("python", "python3"):
        assert first != "-m" or rest[0] in MODULES
        source = "".join(path.read_text() for path in sorted((ROOT / first).parent.glob("*.py")))
        for flag in [word for word in rest if word.startswith("--") and first != "-m" and word != "--help"]:
            assert f'"{flag}"' in source or f"    {flag[2:].replace('-', '_')}: " in source, flag  # of a dataclass
    else:
        assert program in OTHERS
    for word in words:
        if word.partition("/")[0] in FOLDERS and "*" not in word and Path(word).stem != "mine":
            assert (ROOT / word).exists(), word


def check_shell(block: Block, plugins: Path, _: Path) -> None:
    for words in commands(block):
        check_command(words, plugins)


@pytest.mark.parametrize("block", blocks("sh"), ids=str)
def test_a_command_in_the_documentation_is_one_that_works(block: Block, plugins: Path, tmp_path: Path) -> None:
    check_shell(block, plugins, tmp_path)


def test_the_chinese_readme_has_the_commands_and_projects_of_the_english_one() -> None:
    def code(name: str) -> list[object]:
        page = ROOT / name
        shell = [commands(block) for block in blocks("sh", page=page)]
        return [shell, [yaml.safe_load(block.text) for block in blocks("yaml", page=page)]]

    assert code("README.zh-CN.md") == code("README.md")


# ---- YAML


def variants(block: Block) -> Iterator[Any]:
    """The block's document, and those in which a line that is commented out stands in for its neighbour."""
    yield yaml.safe_load(block.text)
    for commented in re.finditer(r"(?m)^( *)# (\w+:) (.*)$", block.text):
        indent, key, _ = commented.groups()
        rest = re.sub(rf"(?m)^{indent}{key}.*\n", "", block.text)
        yield yaml.safe_load(rest.replace(commented[0], commented[0].replace("# ", "", 1)))


def check_document(document: dict[str, Any], file: Path, plugins: Path) -> None:
    """A recipe, a project or a part of a project is accepted."""
    if "input" in document:
        file.write_text(yaml.safe_dump({"output": "data/mine"} | {"tokenizer": "gpt2"} | document))
        _read_recipe(parse(["prepare", "--cfg-path", str(file)]))
        return
    whole = MODEL_AND_DATA | document
    whole["model"] = whole["model"] if "arch" in whole["model"] else MODEL_AND_DATA["model"] | whole["model"]
    run = (
        {"output_dir": "output/mine", "max_iters": 100, "global_batch_size": 8}
        | document.get("run", {})
        | {"plugins": [str(plugins)]}
    )
    file.write_text(yaml.safe_dump(whole | {"run": run}))
    load_config(file)


def check_yaml(block: Block, plugins: Path, folder: Path) -> None:
    for document in variants(block):
        if "task" not in document:  # which is lm-evaluation-harness's
            check_document(document, folder / "shown.yaml", plugins)


@pytest.mark.parametrize("block", blocks("yaml"), ids=str)
def test_a_yaml_block_in_the_documentation_is_accepted(block: Block, plugins: Path, tmp_path: Path) -> None:
    check_yaml(block, plugins, tmp_path)


# ---- Python, JSON, TOML


def check_python(block: Block, *_: Path) -> None:
    try:
        tree = ast.parse(block.text)
    except SyntaxError:
        tree = ast.parse(f"{{\n{block.text}}}")  # items of a mapping
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("crosstrain"):
            assert [a.name for a in node.names if not hasattr(import_module(node.module), a.name)] == []


@pytest.mark.parametrize("block", blocks("python"), ids=str)
def test_python_in_the_documentation_compiles_and_imports_what_exists(block: Block) -> None:
    check_python(block)


def test_json_and_toml_in_the_documentation_parse() -> None:
    for block in blocks("json"):
        json.loads(block.text)
    for block in blocks("toml"):
        tomllib.loads(block.text)


def test_no_block_is_of_a_language_that_nothing_checks() -> None:
    checked = {"sh", "yaml", "python", "json", "toml"}
    assert {block.language for block in blocks()} - checked == {"", "mermaid"}  # what a program prints; diagrams


@pytest.mark.parametrize(
    ("check", "text", "mistake"),
    [
        (check_shell, "crosstrain report output/quickstart --absent", "--absent"),
        (check_shell, "python train.py --cfg-path projects/absent.yaml", "absent.yaml"),
        (check_shell, "python train.py --cfg-path projects/quickstart.yaml --options run.runer=ddp", "run.runer"),
        (check_shell, "crosstrain evaluate --checkpoint output/absent", "output/absent"),
        (check_shell, "pip install 'crosstrain[absent]'", "absent"),
        (check_shell, "python benchmarks/step.py --absent", "absent"),
        (check_shell, "kubectl apply -f deploy/absent.yaml", "absent.yaml"),
        (check_shell, "absent", "absent"),
        (check_shell, "A=1 crosstrain list --absent", "--absent"),
        (check_yaml, "run: {runer: ddp}", "run.runer"),
        (check_yaml, "run:\n  runner: ddp\n  # runner: {name: ddp, absent: 1}", "run.runner.absent"),
        (check_yaml, "input: [{name: jsonl, absent: 1}]", "absent"),
        (check_python, "from crosstrain import Absent", "Absent"),
        (check_python, "def", "invalid syntax"),
    ],
)
def test_the_checks_find_mistakes(check: Any, text: str, mistake: str, plugins: Path, tmp_path: Path) -> None:
    with pytest.raises((UserError, AssertionError, OSError, SyntaxError), match=re.escape(mistake)):
        check(Block(ROOT / "README.md", 1, "", text), plugins, tmp_path)


# ---- in use


def crosstrain(folder: Path, *arguments: str) -> str:
    environment = ENVIRONMENT | {"PYTHONPATH": str(ROOT / "platform"), "CROSSTRAIN_PLUGINS": str(folder / "my_plugins")}
    done = subprocess.run(
        [sys.executable, "-m", "crosstrain", *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.slow
def test_the_plugins_in_the_documentation_train(workspace: Workspace) -> None:
    folder = workspace.path
    write_plugins(folder / "my_plugins")
    (shown,) = blocks("yaml", page=ROOT / "docs" / "plugins.md")
    (folder / "numbers.yaml").write_text(shown.text)
    crosstrain(folder, "train", "--cfg-path", "numbers.yaml", "--options", "run.max_iters=200", "run.runner=mine")
    rows = (folder / "output" / "counting" / "numbers.csv").read_text().splitlines()
    losses = [float(row.split(",")[2]) for row in rows if ",train/loss," in row]
    assert losses[-1] < losses[0] - 1  # from ln(97) = 4.6

    losses = workspace.train("focal", f"run.plugins=[{folder / 'my_plugins'}]", "run.objective=focal").column("loss")
    assert losses[-1] < losses[0] - 0.5

    (folder / "two.fortune").write_text("a quiet saying\n%\nA LOUD ONE\n%\nanother quiet one\n")
    flags = (
        "--input",
        "two.fortune",
        "--train-tokenizer",
        "300",
        "--output",
        "data",
        "--options",
        "clean=[no_shouting]",
    )
    assert "data: 2 documents" in crosstrain(folder, "prepare", *flags)


@pytest.mark.slow
@pytest.mark.timeout(900)  # two of them follow a step of 1,024 ranks
def test_the_plans_in_the_documentation_work(tmp_path: Path) -> None:
    write_plugins(tmp_path / "my_plugins")
    plans = [words for block in blocks("sh") for words in commands(block) if words[:2] == ["crosstrain", "plan"]]
    assert len(plans) >= 5
    for words in plans:
        if "mine" not in Path(words[words.index("--cfg-path") + 1]).stem:
            assert "memory of the fullest rank" in crosstrain(tmp_path, *words[1:], "--no-presets")
