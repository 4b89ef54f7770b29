"""The JSON Schema of project files: it is up to date, and says of a file what the checker says of it."""

from __future__ import annotations

import copy
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from crosstrain_plugins.builtin.commands.schema.json_schema import project_schema
from jsonschema import Draft7Validator

from conftest import ROOT, Workspace
from crosstrain.config.load import load_config
from crosstrain.config.yaml_text import Unreadable, parse
from crosstrain.utils.errors import UserError
from fixtures_mistakes import bases, mutate
from fixtures_ranks import run_ranks

FILE = ROOT / "projects" / "crosstrain.schema.json"
COMMITTED = json.loads(FILE.read_text())
SCHEMA = Draft7Validator(COMMITTED)
# The checker's sentences about types, keys and names. Those about options that do not go together are others.
STRUCTURE = "unknown key|not an option here|required, but missing|name is required|there is no|expected "
# Sentences that a schema cannot say: how long a text is, what it holds, what JSON has no word for (0.0 is an integer).
UNSAID = r"not Unicode|NUL|too long|characters, more than|64 bits|got (-?[0-9.e+]+|nan)$|expected \[first, last\]"
UNSAID += "|list of a whole number or|refers to an unknown key"


@pytest.fixture(scope="module")
def made() -> dict[str, Any]:
    (schema,) = run_ranks(1, project_schema)  # in a process that no other test has registered anything in
    return schema


def test_the_committed_schema_is_what_the_command_prints(made: dict[str, Any]) -> None:
    Draft7Validator.check_schema(made)
    committed, now = COMMITTED["definitions"] | {}, made["definitions"] | {}
    for definitions in (committed, now):  # its options are those of the installed version of another library
        del definitions["runner.deepspeed"]
    assert now == committed, "run: crosstrain schema > projects/crosstrain.schema.json"
    assert made["properties"] == COMMITTED["properties"]


def properties(schema: Any, at: str = "") -> Iterator[tuple[str, Any]]:
    """Every option below a schema."""
    for key, part in schema.items() if isinstance(schema, dict) else enumerate(schema):
        if isinstance(part, (dict, list)):
            yield from properties(part, f"{at}/{key}")
            if key == "properties":
                yield from ((f"{at}/{name}", said) for name, said in part.items() if isinstance(said, dict))


def test_every_option_has_a_meaning(made: dict[str, Any]) -> None:
    options = dict(properties(made))
    assert len(options) > 300
    described = {"arch", "name", "model_type", "adapter", "model", "datasets", "run"}  # by their values
    others = {at: said for at, said in options.items() if at.rpartition("/")[2] not in described}
    assert [at for at, said in others.items() if said["description"].startswith("\n")] == []


@pytest.mark.parametrize("path", sorted((ROOT / "projects").rglob("*.yaml")), ids=lambda path: path.stem)
def test_a_shipped_project_names_its_schema_and_follows_it(path: Path) -> None:
    first, _, text = path.read_text().partition("\n")
    assert (path.parent / first.removeprefix("# yaml-language-server: $schema=")).resolve() == FILE
    assert [error.message for error in SCHEMA.iter_errors(parse(text)[0])] == []


ACCEPTED = [
    ("run", "amp", "bf16"), ("run", "amp", {"dtype": "fp16", "window": 10}), ("run", "on_bad_step", "skip"),
    ("run", "runner", "zero2"), ("run", "runner", {"name": "zero3", "reduce_bucket_size": 1e6}),
    ("run", "runner", {"bucket_cap_mb": 3}), ("run", "runner", "${run.output_dir}"),
    ("run", "seed", "${run.max_iters}"), ("run", "trackers", ["jsonl", {"name": "tensorboard"}]),
    ("run", "profile", {"steps": [2, 3]}),
    ("run", "objective", None), ("run", "init_lr", 1), ("model", "model_type", "tiny"),
    ("model", "adapter", {"name": "lora", "rank": 4}), ("run", "freeze", ["a.*"]),
]  # fmt: skip


@pytest.mark.parametrize(("section", "key", "value"), ACCEPTED, ids=str)
def test_what_the_checker_accepts_follows_the_schema(workspace: Workspace, section: str, key: str, value: Any) -> None:
    tree = copy.deepcopy(workspace.config) | {}
    tree[section][key] = value
    assert [error.message for error in SCHEMA.iter_errors(tree)] == []


REFUSED = [
    ("run", "max_iter", 3), ("run", "runner", "zeroo2"), ("run", "runner", {"name": "fsdp", "stage": 3}),
    ("run", "runner", {"name": "zero2", "shard_size": 3}), ("run", "amp", "bf61"), ("run", "amp", 16),
    ("run", "amp", {"windo": 3}), ("run", "seed", -1), ("run", "seed", 2**63), ("run", "seed", "1"),
    ("run", "init_lr", 0), ("run", "save_best", 1), ("run", "trackers", "jsonl"), ("run", "trackers", [{"x": 1}]),
    ("run", "optimizer", {"name": "adamw", "betas": [0.9]}), ("run", "output_dir", " "), ("run", "profile", {}),
    ("model", "arch", "gpt3"), ("model", "model_type", "huge"), ("model", "n_layr", 2),
    ("model", "adapter", "lora2"), ("datasets", "other", {"name": "text", "path": "x"}), ("datasets", "other", "text"),
]  # fmt: skip


@pytest.mark.parametrize(("section", "key", "value"), REFUSED, ids=str)
def test_what_the_checker_refuses_breaks_the_schema(workspace: Workspace, section: str, key: str, value: Any) -> None:
    tree = copy.deepcopy(workspace.config)
    tree[section][key] = value
    assert not SCHEMA.is_valid(tree)


def agree(data: bytes, path: Path) -> bool | None:
    """True where schema and checker accept a file, False where both refuse it, None where only text is at fault."""
    path.write_bytes(data)
    try:
        tree, _ = parse(data.decode())
        tree = json.loads(json.dumps(tree))  # its keys are texts
    except (Unreadable, UnicodeDecodeError, TypeError):
        return None
    problems = [f"{error.json_path}: {error.message[:300]}" for error in SCHEMA.iter_errors(tree)]
    try:
        load_config(path)
    except UserError as error:
        said = [s for s in error.sentences if re.search(STRUCTURE, s) and not re.search(UNSAID, s)]
        assert problems or not said, said
        return False
    assert problems == []
    return True


def judge(workspace: Workspace, monkeypatch: pytest.MonkeyPatch, seeds: range) -> None:
    monkeypatch.chdir(workspace.path)
    good, seen = bases(workspace), []
    for seed in seeds:
        rng = random.Random(seed)
        data = mutate(rng.choice(good), rng)
        try:
            seen.append(agree(data, workspace.path / "mutant.yaml"))
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}\n{data.decode()}") from error
    assert True in seen
    assert seen.count(False) > len(seeds) / 2


def test_schema_and_checker_agree_on_changed_projects(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    judge(workspace, monkeypatch, range(60, 110))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_schema_and_checker_agree_on_thousands(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    judge(workspace, monkeypatch, range(5000, 8000))
