"""Numbers of a task besides the loss: what a model records, metrics of validation, and models without tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from crosstrain_plugins.builtin.commands.report.page import page
from crosstrain_plugins.builtin.commands.report.read_run import read_runs
from safetensors.numpy import load_file

from conftest import ROOT, Workspace
from crosstrain.config.registry import registry
from crosstrain.modeling.objective import Objective
from crosstrain.monitor.metrics import StepMetrics
from crosstrain.utils.errors import TrainingError
from crosstrain.utils.types import Batch
from fixtures_ranks import mostly_slow, run_ranks, train

PLUGINS = ROOT / "tests" / "third_party"
# Sums over micro batches are rounded in another order, in fp32 within a micro batch.
TOLERANCE = 1e-6


@pytest.fixture
def line(workspace: Workspace) -> Workspace:
    """A regression's project."""
    workspace.config["model"], workspace.config["datasets"] = {"arch": "line"}, {"points": {"name": "points"}}
    workspace.config["run"] |= {
        "plugins": [str(PLUGINS)],
        "metrics": ["regression_error"],
        "max_iters": 4,
        "eval_interval": 2,
        "eval_iters": 9,
        "log_interval": 2,
        "weight_decay": 0.0,
    }
    workspace.project.write_text(yaml.safe_dump(workspace.config))
    return workspace


def points(count: int = 40) -> tuple[np.ndarray, np.ndarray]:
    """The validation split of `points`, once more."""
    own = [np.random.default_rng([index, 0]) for index in range(count)]
    x = np.stack([rng.normal(size=2).astype(np.float32) for rng in own])
    noise = np.stack([rng.normal(0, 0.1, 1) for rng in own])
    return x, (x.sum(1, keepdims=True) + noise).astype(np.float32)


def _evaluate(run: str, output: str) -> int:
    from crosstrain.cli.main import main

    return main(
        [
            "evaluate",
            "--checkpoint",
            run,
            "--splits",
            "val",
            "--output",
            output,
            "--options",
            f"run.plugins=[{PLUGINS}]",
            "run.micro_batch_size=7",
        ]
    )


def test_a_regression_has_errors_and_neither_perplexity_nor_tokens(line: Workspace) -> None:
    pytest.importorskip("plotly")
    run = train(line.project, "line")
    rows, log = run.rows, (run.folder / "log.txt").read_text()
    assert not {word for word in ("perplexity", "token", "lm loss") if word in log}
    assert all(word in log for word in ("  loss ", "samples/s", "validation at step 4 | loss"))
    assert {"samples_per_second", "too_high", "val_too_high", "val_loss"} <= rows[-1].keys()
    assert not {"tokens_per_second", "val_perplexity"} & rows[-1].keys()

    weights = load_file(run.checkpoint(4) / "model.safetensors")
    x, y = points()
    errors = x @ weights["layer.weight"].T + weights["layer.bias"] - y
    expected = {
        "loss": np.square(errors).mean(), "mae": np.abs(errors).mean(), "rmse": np.square(errors).mean() ** 0.5,
        "r2": 1 - np.square(errors).sum() / np.square(y - y.mean()).sum(), "too_high": (errors > 0).mean(),
    }  # fmt: skip
    assert {name: rows[-1][f"val_{name}"] for name in expected} == pytest.approx(expected, rel=1e-5)

    output = line.path / "results.json"
    run_ranks(1, _evaluate, str(run.folder), str(output))
    assert json.loads(output.read_text())["splits"]["val"] == pytest.approx(expected | {"targets": 40}, rel=1e-5)

    report = page(read_runs([str(run.folder)]))
    shown = report[report.index("<body") :]
    assert "nats per target token" not in shown
    assert all(word in shown for word in ("Samples per second", "val_mae"))


@pytest.mark.slow
def test_what_a_model_records_depends_neither_on_ranks_nor_on_micro_batches(line: Workspace) -> None:
    common = ("datasets.points.count=33", "run.global_batch_size=6")  # all 33 are evaluated
    one = train(line.project, "one", *common, "run.micro_batch_size=6")
    # Eleven micro batches of three: the second rank repeats one, which must not count.
    two = train(line.project, "two", *common, "run.micro_batch_size=3", size=2)
    for key in ("too_high", "val_too_high", "val_mae", "val_r2"):
        assert two.column(key) == pytest.approx(one.column(key), rel=TOLERANCE), key
    assert 0 < one.rows[0]["too_high"] < 1


def test_accuracy_counts_known_labels() -> None:
    cls = registry.get("metric", "accuracy")
    metric, logits = cls(None), torch.eye(4)
    assert metric.values(metric.sums(logits, {"labels": torch.tensor([0, 1, -100, 0])}).tolist()) == {"accuracy": 2 / 3}


METRIC = """
import torch
from crosstrain import Metric, registry


@registry.register_metric("two")
class Two(Metric):
    def sums(self, outputs, batch):
        return torch.ones(1)

    def values(self, sums):
        return {"two": 2.0}
"""


@pytest.mark.parametrize("runner", mostly_slow(["ddp", "megatron_tp2_sp", "megatron_pp2", "fsdp"], ["ddp"]))
def test_the_accuracy_of_a_language_model_is_of_all_its_tokens(workspace: Workspace, runner: str) -> None:
    (workspace.path / "mine.py").write_text(METRIC)
    run = train(
        workspace.project,
        "run",
        f"run.runner={runner}",
        "run.metrics=[accuracy, two]",
        "run.max_iters=3",
        "run.eval_interval=2",
        f"run.plugins=[{workspace.path / 'mine.py'}]",
        size=1 if runner == "ddp" else 2,
    )
    assert [row["step"] for row in run.rows if "val_accuracy" in row] == [2, 3]  # the last step is like any other
    assert run.rows[-1]["val_two"] == 2
    [(found, expected)] = run_ranks(1, _accuracies, run.checkpoint(3), workspace.path / "results.json")
    # Ranks sum in another order, and of thousands of tokens some have two likeliest ones that are nearly equal.
    assert found == pytest.approx(expected, abs=1e-3)
    assert expected > 0
    assert run.rows[-1]["val_accuracy"] == pytest.approx(expected, abs=0.05)  # of fewer samples


def _accuracies(checkpoint: Path, output: Path) -> tuple[float, float]:
    """The accuracy by `evaluate`, which does not have the plugin of the other metric, and by an export's logits."""
    from transformers import AutoModelForCausalLM

    from crosstrain.cli.main import main
    from crosstrain.data.splits import open_split
    from crosstrain.inference.open_checkpoint import saved_config

    options = ["--options", "run.runner=ddp"]
    assert not main(["evaluate", "--checkpoint", str(checkpoint), "--splits", "val", "--output", str(output), *options])
    export = output.with_name("export")
    assert not main(["export", "--checkpoint", str(checkpoint), "--output", str(export)])
    split = open_split(saved_config(checkpoint, []), "val")
    batch = split.collate([split.get(index, np.random.default_rng()) for index in range(len(split))])
    likeliest = AutoModelForCausalLM.from_pretrained(export)(input_ids=batch["input_ids"]).logits.argmax(-1)
    expected = (likeliest == batch["labels"]).float().mean().item()
    return json.loads(output.read_text())["splits"]["val"]["accuracy"], expected


@pytest.mark.slow
def test_a_metric_that_fails_is_named_with_the_shapes_that_it_was_given(workspace: Workspace) -> None:
    options = (f"run.plugins=[{PLUGINS}]", "run.metrics=[regression_error]", "run.max_iters=1", "run.eval_interval=1")
    said = workspace.train("out", *options, fails=True).err
    given = "outputs [4, 320], input_ids [4, 32], labels [4, 32]"
    assert f"error: run.metrics: RegressionError failed in sums, given {given}: RuntimeError: " in said
    assert "regression_error.py:" in said


def test_a_count_of_targets_that_is_no_int_names_its_method() -> None:
    class Mine(Objective):
        def units(self, batch: Batch) -> Any:
            return batch["labels"].mean() if "labels" in batch else len(batch["rows"])

    with pytest.raises(TrainingError, match=r"Mine.units has to return the number of targets, an int, not ten"):
        Mine(None).num_targets({"labels": torch.ones(3)})
    assert Mine(None).num_targets({"rows": torch.ones(3)}) == 3


def test_a_name_that_is_taken_is_refused() -> None:
    with pytest.raises(TrainingError, match="two values are called 'loss'"):
        StepMetrics(1, 0.5, 0.1, 1.0, 1.0, 8, 0, recorded={"loss": 2.0}).row()
