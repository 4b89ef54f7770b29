"""Mistakes in a project file are told before torch is imported, in the words of the full check."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from conftest import ROOT
from crosstrain.config.ahead import AheadChecker, apart
from crosstrain.config.describe import options as options_of
from crosstrain.config.load import check_ahead, load_config
from crosstrain.config.registry import KINDS, registry
from crosstrain.config.schema import Checker
from crosstrain.utils.errors import ConfigError, UserError
from fixtures_plugins import isolate, write
from fixtures_ranks import run_ranks

# As first lines: nothing of these can be imported.
NOTHING_HEAVY = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        assert name not in ("torch", "transformers", "deepspeed", "numpy"), f"{name} was imported"

sys.meta_path.insert(0, Refuse())
"""


def python(code: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env=os.environ | {"PYTHONPATH": f"{ROOT}/platform{os.pathsep}{ROOT}/tests{os.pathsep}{ROOT}/tests/config"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


MISTAKES = {
    "gpt2_345m": ["run.max_iter=3", "run.seed=-1", "model.nheads=3", "run.runner.overlap_com=true"],
    "gpt2_chat_dpo": ["run.objective.beta=true", "run.callbacks=[emaa]", "model.adapter.rnk=3"],
    "llama3_8b_sft": ["run.save_steps=3", "model.adapter={name: lora, rank: half}", "run.runner=fsd"],
    "qwen3_30b_a3b": ["run.optimizer={name: muon, adamw: {beta: 1}}", "run.runner.expert_parallel=0"],
    "blip2_qwen7b_instruct": ["model.vision.depht=3", "datasets.mixed.seq_len=3", "run.runner.stage=5"],
    "blip2_qwen_shapes": ["run.trackers=[wandb, 3]", "run.metrics=[acuracy]", "run.runner={name: fsdp, offload: 1}"],
}


def test_every_verb_tells_a_mistake_before_torch_is_imported(tmp_path: Path) -> None:
    project = tmp_path / "my.yaml"
    project.write_text((ROOT / "projects/quickstart.yaml").read_text().replace("max_iters", "max_iter"))
    main = "\nfrom crosstrain.cli.main import main\nprint(*(main([*words.split(), *sys.argv[1:]]) for words in WORDS))"
    verbs = ["train", "train --dry-run", "plan", "samples", "verify", "launch --to slurm"]
    code = f"WORDS = {verbs}{NOTHING_HEAVY}sys.stderr = sys.stdout{main}"
    told = python(code, "--cfg-path", str(project)).splitlines()
    error = f"error: {project}:23: run.max_iter: unknown key; did you mean run.max_iters?"
    assert told == [error] * len(verbs) + [" ".join("1" * len(verbs))]


def told_of_mistakes(ahead: bool) -> dict[str, list[str]]:
    """The sentences about each project, before or after its components are imported."""
    found = {}
    for name, options in MISTAKES.items():
        try:
            (check_ahead if ahead else load_config)(ROOT / "projects" / f"{name}.yaml", options)
        except UserError as error:
            found[name] = error.sentences
    return found


def options_of_all(ahead: bool) -> dict[str, list[list[str]]]:
    """The options of each component, read from its source or imported."""
    checker = (AheadChecker if ahead else Checker)(str)

    def read() -> dict[str, list[list[str]]]:
        classes = {f"{kind} {n}": checker.options_class(kind, n) for kind in KINDS for n in registry.names(kind)}
        return {
            key: [[o.name, str(o.type), str(o.required), str(o.default)] for o in options_of(cls)]
            for key, cls in classes.items()
        }

    return (apart(read) or {}) if ahead else read()


def both(function: Callable[[bool], dict[str, list[Any]]]) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
    """What `function` finds ahead, where nothing heavy can be imported, and what it finds by importing."""
    code = f"{NOTHING_HEAVY}import json, test_ahead\nprint(json.dumps(test_ahead.{function.__name__}(True)))"
    (imported,) = run_ranks(1, function, False)
    return json.loads(python(code)), imported


def test_what_is_told_ahead_is_what_the_full_check_tells() -> None:
    ahead, full = both(told_of_mistakes)
    assert ahead == full
    assert {name: len(sentences) for name, sentences in ahead.items()} == {n: len(o) for n, o in MISTAKES.items()}


def test_the_options_of_every_component_are_read_as_they_are_imported() -> None:
    ahead, imported = both(options_of_all)
    assert ahead == imported
    assert len(ahead) > 50
    assert sum(map(len, ahead.values())) > 250


# ---- plugins of others

HELPER = """
import torch
from crosstrain import NonNegativeInt, OptionError

HEAVY = torch.ones(3)
LIMIT = Most = 7
Length = NonNegativeInt | None

class Base(torch.nn.Module):
    def weigh(self, tensor: torch.Tensor = None) -> torch.Tensor: ...
    class Options:
        pass
"""
MINE = """
import heavy
from dataclasses import dataclass, field
from typing import Annotated
from annotated_types import Le
from crosstrain import Dataset, Split, registry
{imports}

@registry.register_lr_scheduler("flat")
def flat() -> heavy.Tensor:
    return 1

@dataclass
class Common:
    length: Length = LIMIT
    shape: int = field(default_factory=flat)

    def __post_init__(self) -> None:
        if self.length == 3:
            raise OptionError("length", "3 is taken")
        if self.length == 4:
            heavy.compute()

class Middle(Dataset):
    @dataclass
    class Options(Common):
        kind: Annotated[int, Le(Most)] = 1

@registry.register_dataset("mine")
class Mine(Middle):
    def __init__(self, options: Middle.Options, split: Split, how: heavy.Tensor) -> None: ...
"""
PROJECT = "model: {arch: none}\ndatasets: {it: {name: mine, %s}}\nrun: {output_dir: out, max_iters: 1}"


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    yield from isolate(monkeypatch, tmp_path)


def told(home: Path, options: str) -> list[str]:
    """Return what is told about the dataset; there is no model, and no runner."""
    (home / "my.yaml").write_text(PROJECT % options)
    with pytest.raises(ConfigError) as caught:
        check_ahead("my.yaml")
    return [text for text in caught.value.sentences if "datasets" in text]


@pytest.mark.parametrize("packaged", [False, True])
def test_a_plugin_of_others_is_read_too(home: Path, monkeypatch: pytest.MonkeyPatch, packaged: bool) -> None:
    files = {"sub/mine.py": MINE.format(imports="from ..helper import LIMIT, Length, Most, OptionError"),
             "helper.py": HELPER, "sub/__init__.py": HELPER, "__init__.py": HELPER}  # fmt: skip
    if packaged:
        write(home / "site", {f"theirs/{name}": text for name, text in files.items()})
        write(
            home / "site",
            {
                "theirs-1.dist-info/METADATA": "Name: theirs\nVersion: 1",
                "theirs-1.dist-info/entry_points.txt": "[crosstrain.plugins]\nit = theirs",
            },
        )
        monkeypatch.syspath_prepend(home / "site")
    else:
        write(home / "plugins", files)
    where = "my.yaml:2: datasets.it"
    assert told(home, "lenght: 1") == [f"{where}.lenght: unknown key; did you mean datasets.it.length?"]
    assert told(home, "length: x") == [f"{where}.length: expected a whole number or null, got the text 'x'"]
    assert told(home, "length: -1") == [f"{where}.length: expected a whole number of at least 0, got -1"]
    assert told(home, "kind: 8") == [f"{where}.kind: expected a whole number of at most 7, got 8"]
    assert told(home, "length: 3") == [f"{where}.length: 3 is taken"]
    assert told(home, "length: 4") == told(home, "length: 5, kind: 7") == []  # what needs heavy waits for the import
    assert not registry._objects  # what was run is no component


UNREADABLE = {
    "its base is another library's": "import heavy\n@REGISTER\nclass Mine(heavy.Dataset): ...",
    "its options are another library's": "import heavy\n@REGISTER\nclass Mine:\n Options = heavy.Options",
    "its default is another library's": "import heavy\n@REGISTER\nclass Mine:\n"
    " @dataclass\n class Options:\n  it: int = heavy.NUMBER",
    "a type of another library": "import heavy\n@REGISTER\nclass Mine:\n @dataclass\n class Options:\n  it: heavy.Int",
    "a bound of another library": "import heavy\n@REGISTER\nclass Mine:\n @dataclass\n class Options:\n  it: int = 1\n"
    "  def __post_init__(self):\n   if self.it != heavy.NUMBER: raise crosstrain.OptionError('it', 'no')",
    "it cannot be imported": "import heavy\nheavy.NUMBER + 1\n@REGISTER\nclass Mine: ...",
}


@pytest.mark.parametrize("reason", UNREADABLE)
def test_a_plugin_that_depends_on_a_library_is_left_to_the_full_check(home: Path, reason: str) -> None:
    text = UNREADABLE[reason].replace("REGISTER", 'registry.register_dataset("mine")')
    write(
        home / "plugins",
        {"mine.py": f"import crosstrain\nfrom dataclasses import dataclass\nfrom crosstrain import registry\n{text}"},
    )
    assert told(home, "it: 3") == []
    with pytest.raises(UserError, match=r"needs the package|importing it failed"):
        registry.get("dataset", "mine")
