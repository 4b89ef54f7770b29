"""Runs and checkpoints from before `split_rounding` go on with the split that they began with."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from conftest import ROOT, Workspace
from crosstrain.checkpoint.checkpointer import load_state
from crosstrain.config.load import Config, load_config
from crosstrain.inference.open_checkpoint import open_config
from crosstrain.training.preflight import as_begun, preflight

OLD = ROOT / "tests" / "checkpoint" / "format_2" / "ddp"


def text_of(config: Config) -> Any:
    (component,) = config.datasets.values()
    return component.options


def without_key(plain: Any) -> Any:
    if isinstance(plain, dict):
        return {key: without_key(value) for key, value in plain.items() if key != "split_rounding"}
    return [without_key(part) for part in plain] if isinstance(plain, list) else plain


def test_new_projects_round_as_megatron_core(workspace: Workspace) -> None:
    config = load_config(str(workspace.project))
    assert text_of(config).split_rounding == "core"
    assert text_of(Config.from_plain(config.plain)).split_rounding == "core"


def test_a_stored_configuration_without_the_key_is_the_old_rule(workspace: Workspace) -> None:
    plain = load_config(str(workspace.project)).plain
    assert text_of(Config.from_plain(without_key(plain))).split_rounding == "legacy"


def test_so_are_the_parts_of_a_stored_mixture(workspace: Workspace) -> None:
    tiny = workspace.config["datasets"]["tiny"]
    project = workspace.config | {"datasets": {"a": tiny, "b": copy.deepcopy(tiny)}}
    new = load_config(project)
    assert [part["dataset"].options.split_rounding for part in parts_of(new)] == ["core", "core"]
    old = Config.from_plain(without_key(new.plain))
    assert [part["dataset"].options.split_rounding for part in parts_of(old)] == ["legacy", "legacy"]
    continued = new.continuing({"config": without_key(new.plain)})
    assert [part["dataset"].options.split_rounding for part in parts_of(continued)] == ["legacy", "legacy"]
    assert new.continuing({"config": new.plain}) == new


def parts_of(config: Config) -> list[Any]:
    return [vars(part) for part in text_of(config).parts]


def test_a_checkpoint_from_before_is_evaluated_on_its_split(workspace: Workspace) -> None:
    assert "split_rounding" not in str(load_state(OLD)["config"])
    config = open_config(OLD, None, (), trust_data=True)
    assert text_of(config).split_rounding == "legacy"
    assert text_of(open_config(OLD, str(workspace.project), (), False)).split_rounding == "legacy"


@pytest.mark.parametrize(("key", "fresh", "rule"), [
    ("resume_from", False, "legacy"), ("resume_from", True, "legacy"), ("output_dir", False, "legacy"),
    ("output_dir", True, "core"),
])  # fmt: skip
def test_a_run_from_before_goes_on_with_its_split(
    workspace: Workspace, tmp_path: Path, key: str, fresh: bool, rule: str
) -> None:
    run = tmp_path / "old" / "checkpoints" / "step_000004"
    run.parent.mkdir(parents=True)
    run.mkdir()
    for file in OLD.iterdir():
        (run / file.name).write_bytes(file.read_bytes())
    config = load_config(str(workspace.project), [f"run.output_dir={tmp_path}/new", f"run.{key}={run.parent.parent}"])
    assert text_of(as_begun(config, fresh)).split_rounding == rule
    assert text_of(preflight(config, 1, fresh=fresh).config).split_rounding == rule
