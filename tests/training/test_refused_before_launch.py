"""Settings and folders that cannot work are refused in one sentence, before a worker starts."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import NoReturn

import pytest

from conftest import Workspace
from crosstrain.checkpoint import run_folder
from crosstrain.checkpoint.run_folder import RunFolder
from crosstrain.cli.main import main
from crosstrain.config.load import load_config
from crosstrain.config.yaml_text import LARGEST_TREE, Unreadable, parse
from crosstrain.utils.errors import ConfigError, TrainingError, UserError
from crosstrain.utils.units import finite


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["run.grad_norm_clip=1e-300"], "grad_norm_clip: 1e-300 reduces gradients to almost 0"),
        (["run.grad_norm_clip=1e300"], "grad_norm_clip: expected"),
        (["run.objective={name: dpo, beta: 9223372036854775808}"], "beta: expected"),
        (["run.objective={name: orpo, beta: 1e-300}"], "beta: expected"),
        (["run.objective={name: kto, desirable_weight: 1e30}"], "desirable_weight: expected"),
        (["run.on_bad_step={policy: skip, spike: 1e30}"], "spike: expected"),
        (["run.init_lr=1e-300"], "init_lr: expected"),
        (["run.eval_interval=5", "run.callbacks=[{name: early_stopping, min_delta: 1e300}]"], "min_delta: expected"),
    ],
)
def test_numbers_that_mean_nothing_are_refused(workspace: Workspace, options: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_config(str(workspace.project), options)


@pytest.mark.parametrize(
    "options", [["run.grad_norm_clip=0"], ["run.grad_norm_clip=1e-3"], ["run.on_bad_step={spike: 1.5}"]]
)
def test_small_and_absent_limits_are_taken(workspace: Workspace, options: list[str]) -> None:
    load_config(str(workspace.project), options)


def refused(workspace: Workspace, capsys: pytest.CaptureFixture[str], *options: str) -> str:
    """The one sentence with which a start ends before there are workers."""
    assert main(["train", "--cfg-path", str(workspace.project), "--options", *options]) == 1
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    return line


METRICS = [
    ("early_stopping", "val_los", "known: val_loss"),
    ("early_stopping", "val_lsos", "known: val_loss"),
    ("best_checkpoints", "val_perplexty", "known: val_perplexity"),
    ("early_stopping", "loss", "known: val_loss, val_perplexity, val_accuracy"),
    ("best_checkpoints", "eval_loss", "known: val_loss"),
    ("early_stopping", "val_acuracy", "known: val_accuracy"),
]


@pytest.mark.parametrize(("callback", "metric", "said"), METRICS)
def test_a_misspelt_metric_is_refused(
    workspace: Workspace, capsys: pytest.CaptureFixture[str], callback: str, metric: str, said: str
) -> None:
    followed = f"run.callbacks=[{{name: {callback}, metric: {metric}}}]"
    line = refused(workspace, capsys, "run.eval_interval=5", "run.metrics=[accuracy]", followed)
    assert f"run.callbacks: validation has no metric {metric}; {said}" in line
    assert not (workspace.path / "out").exists()


@pytest.mark.parametrize("kind", ["/dev/zero", "/dev/null/run", "/proc/run", "file", "fifo", "dangling", "file/below"])
def test_a_folder_that_cannot_be_made_is_refused(
    workspace: Workspace, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    place = Path(kind) if kind.startswith("/") else workspace.path / kind
    if kind.startswith("file"):
        (workspace.path / "file").touch()
    elif kind == "fifo":
        os.mkfifo(place)
    elif kind == "dangling":
        place.symlink_to(workspace.path / "nothing" / "there")
    line = refused(workspace, capsys, f"run.output_dir={place}")
    assert f"run.output_dir: {place} cannot be written to" in line


def test_parts_of_a_mixture_of_different_lengths_are_refused(
    workspace: Workspace, dataset: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = ", ".join(f"{{dataset: {{name: text, path: {dataset}, seq_length: {n}}}}}" for n in (16, 32))
    line = refused(workspace, capsys, f"datasets={{mixed: {{name: mixture, parts: [{parts}]}}}}")
    assert "the parts of a mixture have samples of [16, 32] tokens: give all parts the same seq_length" in line


def test_nvme_without_its_library_is_refused(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    builders = pytest.importorskip("deepspeed.ops.op_builder")
    from crosstrain.training.preflight import preflight

    monkeypatch.setattr(builders.AsyncIOBuilder, "has_function", lambda *_, **__: False)
    nvme = [f"run.runner.{key}.nvme_path={workspace.path}" for key in ("offload_optimizer", "offload_param")]
    config = load_config(str(workspace.project), ["run.runner=zero3_nvme", *nvme])
    with pytest.raises(ConfigError, match=r"offloading to nvme needs libaio, .*: run `apt-get install libaio-dev`"):
        preflight(config, 1)


# ---- what others read of a run


def _no_constant(name: str) -> NoReturn:
    raise AssertionError(f"{name} is not JSON")


@pytest.mark.parametrize("loss", ["Infinity", "-Infinity", "NaN"])
def test_status_prints_json(tmp_path: Path, capsys: pytest.CaptureFixture[str], loss: str) -> None:
    (tmp_path / "log.txt").write_text("2026-01-01 00:00:00 global batch 8\n")
    (tmp_path / "config.yaml").write_text("run: {max_iters: 9}\n")
    (tmp_path / "metrics.jsonl").write_text(f'{{"step": 3, "loss": {loss}}}\n')
    assert main(["status", "--json", str(tmp_path)]) == 0
    found = json.loads(capsys.readouterr().out, parse_constant=_no_constant)
    assert (found["step"], found["loss"], found["max_iters"]) == (3, None, 9)


LONG = {
    "list": "[" + "1," * 500_000 + "]",
    "lines": "- a\n" * 250_000,
    "mapping": "".join(f"k{n}: 1\n" for n in range(100_000)),
    "flow mapping": "{" + ",".join(f"k{n}: 1" for n in range(90_000)) + "}",
    "deep": "[" * 1_000_000,
    "aliases": "a: &a 1\nb: [" + "*a," * 300_000 + "]",
}


@pytest.mark.parametrize("kind", LONG)
def test_a_long_configuration_is_read_no_further_than_the_bound(kind: str) -> None:
    begun = time.process_time()
    with pytest.raises(Unreadable, match=f"more than {LARGEST_TREE:,} values|nested too deeply"):
        parse(LONG[kind])
    assert time.process_time() - begun < 5


def test_a_deleted_lock_ends_the_run_that_held_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_folder, "_PATIENCE", 0.1)
    living = RunFolder(tmp_path / "out")
    living.create({"run": {}})
    living.check_kept()
    assert RunFolder(tmp_path / "out").is_held()
    with pytest.raises(UserError, match="another process is training in"):
        RunFolder(tmp_path / "out").create({"run": {}})
    (tmp_path / "out" / ".lock").unlink()
    with pytest.raises(TrainingError, match="was moved, deleted or taken over by a different run"):
        living.check_kept()
    living.release()
    assert not RunFolder(tmp_path / "out").is_held()
    RunFolder(tmp_path / "out").create({"run": {}})


def test_numbers_without_a_form_in_json_are_null_at_any_depth() -> None:
    nan, inf = float("nan"), float("inf")
    given = {"loss": nan, "timers": {"forward": inf, "backward": 1.5}, "rows": [1, (-inf, "inf")], "step": 3}
    text = json.dumps(finite(given), allow_nan=False)
    assert json.loads(text) == {
        "loss": None,
        "timers": {"forward": None, "backward": 1.5},
        "rows": [1, [None, "inf"]],
        "step": 3,
    }
