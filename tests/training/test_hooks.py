"""The platform's hooks: their order, and callbacks that take their place."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from conftest import Workspace
from fixtures_ranks import make_trainer, run_ranks, train

PLUGIN = """
from crosstrain import Callback, Validation, registry


@registry.register_callback("quiet_validation")
class QuietValidation(Callback):
    replaces = "validation"

    def after_step(self, metrics):
        row = {"val_loss": 7.0 + metrics.step}
        self.trainer.hooks.call("on_validation", row)
        self.trainer.row |= row


@registry.register_callback("first_samples")
class FirstSamples(Validation):
    replaces = "validation"

    def measure(self, dataset):
        metrics = super().measure(dataset)
        self.trainer.row["val_measured"] = metrics.loss
        return metrics


@registry.register_callback("doubter")
class Doubter(Callback):
    def after_backward(self, batch, loss):
        return "it is the second step" if self.trainer.state.step == 1 else None


@registry.register_callback("stranger")
class Stranger(Callback):
    replaces = "nothing"
"""


def project(workspace: Workspace, *callbacks: str, **run: object) -> Path:
    (workspace.path / "mine.py").write_text(PLUGIN)
    plugins = [str(workspace.path / "mine.py")]
    workspace.config["run"] |= {"plugins": plugins, "callbacks": list(callbacks), "log_interval": 1, **run}
    workspace.project.write_text(yaml.safe_dump(workspace.config))
    return workspace.project


def _order(path: str) -> list[str]:
    trainer = make_trainer(path, (f"run.output_dir={path}.out",))
    trainer.runner.close()
    return list(trainer.hooks.ordered())


def test_callbacks_stand_between_the_platforms_hooks_or_in_the_place_of_one(workspace: Workspace) -> None:
    (names,) = run_ranks(1, _order, str(project(workspace, "doubter", "quiet_validation")))
    assert names == [
        "profile",
        "bad_steps",
        "doubter",
        "settled",
        "stragglers",
        "log",
        "quiet_validation",
        "prompt_samples",
        "best",
        "tracking",
        "saving",
        "digests",
    ]


def test_a_callback_replaces_the_validation(workspace: Workspace) -> None:
    run = train(project(workspace, "quiet_validation", max_iters=3, eval_interval=1), "run")
    assert [row["val_loss"] for row in run.rows] == [8.0, 9.0, 10.0]
    log = (run.folder / "log.txt").read_text()
    assert "validation at step" not in log
    assert "  loss " in log
    assert (run.folder / "checkpoints" / "best").read_text().strip() == "step_000001"


def test_a_callback_that_derives_from_the_validation_changes_what_is_measured(workspace: Workspace) -> None:
    run = train(project(workspace, "first_samples", max_iters=2, eval_interval=1), "run")
    assert [row["val_loss"] for row in run.rows] == [row["val_measured"] for row in run.rows]
    assert (run.folder / "checkpoints" / "best").exists()


def test_a_callback_may_refuse_a_step(workspace: Workspace) -> None:
    run = train(project(workspace, "doubter", max_iters=3, on_bad_step="skip"), "run")
    assert [row["skipped_steps"] for row in run.rows if "loss" in row] == [0, 1, 1]


def test_a_hook_that_does_not_exist_cannot_be_replaced(workspace: Workspace) -> None:
    with pytest.raises(AssertionError, match="a callback replaces nothing, which is not a platform hook"):
        run_ranks(1, _order, str(project(workspace, "stranger")))


def test_a_hook_of_every_run_is_not_named_twice(workspace: Workspace) -> None:
    with pytest.raises(AssertionError, match=r"run\.callbacks: profile is a hook of every run: remove it"):
        run_ranks(1, _order, str(project(workspace, "profile")))
