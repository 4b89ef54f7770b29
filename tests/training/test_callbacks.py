"""Callbacks: their moments, an average of the weights, early stopping, the best checkpoints."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

import crosstrain
from conftest import ROOT, Run, Workspace
from crosstrain.checkpoint.files import Reader
from crosstrain.config.load import load_config
from crosstrain.utils.errors import ConfigError
from fixtures_ranks import run_ranks, train
from fixtures_server import serving

PLUGINS = ROOT / "tests" / "third_party"


def project(workspace: Workspace, *callbacks: dict[str, Any] | str, **run: Any) -> Path:
    workspace.config["run"] |= {
        "callbacks": list(callbacks),
        "plugins": [str(PLUGINS)],
        "lr_decay_iters": 20,
        "save_best": False,
        "log_interval": 2,
        **run,
    }
    workspace.project.write_text(yaml.safe_dump(workspace.config))
    return workspace.project


def weights(checkpoint: Path, name: str | None = None) -> dict[str, Tensor]:
    reader = Reader.open(checkpoint, name)
    return {name: reader.whole(name) for name in sorted(reader.names("param"))}


def state(checkpoint: Path) -> dict[str, Any]:
    return json.loads((checkpoint / "state.json").read_text())


def command(*arguments: str) -> tuple[int, str]:
    """The command line's exit code, and what it printed."""
    from crosstrain.cli.main import main

    with contextlib.redirect_stderr(io.StringIO()) as err:
        return main([*arguments]), err.getvalue()


def _use(run: str, folder: str) -> list[Any]:
    common = ("evaluate", "--checkpoint", run, "--splits", "val", "--max-samples", "16")
    return [
        command(*common, "--output", f"{folder}/trained.json"),
        command(*common, "--output", f"{folder}/average.json", "--weights", "ema"),
        command("export", "--checkpoint", run, "--output", f"{folder}/exported", "--weights", "ema"),
        command("evaluate", "--checkpoint", f"{run}/checkpoints/step_000000", "--weights", "exp_avg"),
        command("serve", "--checkpoint", run, "--weights", "exp_avg"),
    ]


@pytest.mark.slow
def test_an_average_of_the_weights_follows_roll_backs_resumes_and_is_used(workspace: Workspace) -> None:
    keys = {"max_iters": 6, "save_interval": 1, "keep_last": None, "on_bad_step": "roll_back", "eval_interval": 3}
    path = project(workspace, {"name": "ema", "decay": 0.9}, {"name": "diary", "poison": 4}, **keys)
    run = train(path, "run")
    assert '"step": 4' in (run.folder / "bad_steps.jsonl").read_text()
    average = weights(run.checkpoint(0))  # where it begins
    for step in range(1, 7):  # the file of every step follows by hand from that before
        trained = weights(run.checkpoint(step))
        average = {name: value.lerp(trained[name], 1 - 0.9) for name, value in average.items()}
        assert all(map(torch.equal, average.values(), weights(run.checkpoint(step), "ema").values())), step
    last = state(run.checkpoint(6))["callbacks"]["diary"]
    assert last["steps"] == [1, 2, 3, 4, 5, 6]  # not the one that was rolled back
    step = ["before_step", "after_backward", "after_step"]
    saves = [f"on_save step_{n:06d}" for n in range(7)]
    moments = json.loads((run.folder / "diary.json").read_text())
    assert moments[:9] == ["on_start", saves[0], *step, saves[1], *step]
    assert moments[-3:] == ["on_validation", saves[6], "on_end"]
    assert [row["diary/pages"] for row in run.rows if "loss" in row][-1] == len(moments) - 3
    assert run.rows[-1]["diary/val_loss"] == run.rows[-1]["val_loss"]
    logged = {row["step"]: row for row in run.rows if "loss" in row}
    assert all(logged[step]["diary/saved"] == step - 1 for step in (2, 6))  # in the next line

    for number in (5, 6):
        shutil.rmtree(run.checkpoint(number))
    train(path, "run")  # the same command again
    again = weights(run.checkpoint(6), "ema")
    assert all(map(torch.equal, average.values(), again.values()))
    assert state(run.checkpoint(6))["callbacks"]["diary"]["steps"] == last["steps"]

    ((*fine, refused, not_served),) = run_ranks(1, _use, str(run.folder), str(workspace.path))
    assert [code for code, _ in fine] == [0, 0, 0], fine
    assert not any("note" in said for _, said in fine)  # of plugins, which one's own run needs no more
    assert (refused[0], "has no weights called 'exp_avg'; it has ema" in refused[1]) == (1, True), refused
    assert (not_served[0], "has no weights called 'exp_avg'; it has ema" in not_served[1]) == (1, True), not_served
    results = [json.loads((workspace.path / f"{name}.json").read_text()) for name in ("trained", "average")]
    assert results[0]["splits"]["val"]["loss"] != results[1]["splits"]["val"]["loss"]
    exported = Reader.open_hugging_face(workspace.path / "exported")
    assert all(torch.equal(exported.whole(name), value) for name, value in again.items())


@pytest.mark.slow
def test_a_server_computes_with_the_averaged_weights(workspace: Workspace) -> None:
    run = train(project(workspace, {"name": "ema", "decay": 0.97}, max_iters=8, init_lr=0.05), "run")
    expected = []
    for name in (None, "ema"):
        with crosstrain.open(run.folder, weights=name) as model:
            expected.append(model.generate("ban", max_new_tokens=16, temperature=1, seed=5))
    assert expected[0] != expected[1]
    for flags, text in zip(((), ("--weights", "ema")), expected, strict=True):
        with serving(run.folder, "--name", "m", *flags) as (url, _):
            request = urllib.request.Request(
                f"{url}/v1/completions",
                headers={"Content-Type": "application/json"},
                data=json.dumps({"model": "m", "prompt": "ban", "max_tokens": 16, "seed": 5}).encode(),
            )
            with urllib.request.urlopen(request) as answer:
                assert json.load(answer)["choices"][0]["text"] == text


@pytest.mark.slow
def test_a_run_that_stopped_early_stays_ended_and_the_best_checkpoints_stay(workspace: Workspace) -> None:
    stopping = {"name": "early_stopping", "patience": 2, "min_delta": 5.0}  # no validation is so much better
    best = {"name": "best_checkpoints", "mode": "max", "count": 2}  # the loss falls, so the first ones
    path = project(workspace, stopping, best, max_iters=9, save_interval=1, eval_interval=1, eval_iters=1, keep_last=1)
    run = train(path, "run")
    log = (run.folder / "log.txt").read_text()
    assert "training ends after step 3: val_loss has not improved in 2 validations" in log
    assert "open next:" in log  # as at any other end
    assert sorted(p.name for p in (run.folder / "checkpoints").glob("step_*")) == [f"step_00000{n}" for n in (1, 2, 3)]
    assert (run.folder / "checkpoints" / "best_val_loss").read_text() == "step_000001\n"
    ended = state(run.checkpoint(3))
    assert ended["callbacks"]["early_stopping"]["bad"] == 2
    train(path, "run")  # the same command again trains nothing
    assert [row["step"] for row in run.rows][-1] == 3
    workspace.config["run"]["callbacks"][0]["patience"] = 3
    train(project(workspace, *workspace.config["run"]["callbacks"]), "run")
    assert state(run.checkpoint(4))["callbacks"]["early_stopping"] == ended["callbacks"]["early_stopping"] | {"bad": 3}


def test_a_run_that_ends_between_logged_steps_logs_its_last_one(workspace: Workspace) -> None:
    path = project(workspace, {"name": "diary", "ends_after": 3}, max_iters=9, log_interval=100, eval_interval=None)
    run = train(path, "run")
    (row,) = run.rows
    assert row["step"] == 3
    assert {"loss", "diary/pages"} <= row.keys()


def _mistakes(path: str) -> list[tuple[int, str]]:
    here, options = Path(path).parent, []
    for number, callback in enumerate(
        ("{name: diary, fails_in: after_backward}", "{name: early_stopping, metric: val_accuracy}")
    ):
        options.append([f"run.output_dir={here}/wrong{number}", f"run.callbacks=[{callback}]"])
    return [command("train", "--cfg-path", path, "--options", *given) for given in options]


def test_an_error_in_a_callback_names_it_and_the_moment(workspace: Workspace) -> None:
    path = project(workspace, max_iters=2, eval_interval=1, eval_iters=1)
    ((broken, unknown),) = run_ranks(1, _mistakes, str(path))
    assert broken[0] == unknown[0] == 1
    assert "run.callbacks: diary failed in after_backward: ValueError: ink is dry (" in broken[1]
    assert "diary.py:" in broken[1]
    failed = "early_stopping failed in on_validation: "
    assert f"{failed}validation has no metric val_accuracy; known: val_loss," in unknown[1]
    with pytest.raises(ConfigError, match=r"run\.callbacks: ema is listed twice"):
        load_config(path, ["run.plugins=[]", "run.callbacks=[ema, {name: ema, decay: 0.5}]"])
    with pytest.raises(ConfigError, match="did you mean early_stopping"):
        load_config(path, ["run.plugins=[]", "run.callbacks=[early_stoping]"])


# ---- under every runner

SGD = {"optimizer": {"name": "sgd", "momentum": 0.9}, "init_lr": 0.05, "micro_batch_size": 2}
EVERYWHERE = ("ddp@2", "fsdp@2", "zero2@2", "zero3@2", "megatron_tp2@2")
# Of a tensor's norm: weights of one process and of two differ by the rounding of sums, as losses do by 2e-6.
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def one_process(shared_workspace: Workspace) -> Run:
    shared_workspace.config["model"]["dropout"] = 0.0
    path = project(shared_workspace, {"name": "ema", "decay": 0.8}, max_iters=6, save_interval=3, log_interval=1, **SGD)
    return train(path, "one")


def _loss(checkpoint: str, options: tuple[str, ...]) -> float:
    from crosstrain.data.splits import open_split
    from crosstrain.engine.build import build_model, make_runner
    from crosstrain.inference.perplexity import evaluate_loss

    config = load_config(Path(checkpoint).parents[2] / "project.yaml", options)
    runner = make_runner(config)
    runner.setup()
    build_model(config, runner, Path(checkpoint), for_training=False, weights="ema")
    loss = evaluate_loss(runner, open_split(config, "val"), 4, 16).loss
    runner.close()
    return loss


@pytest.mark.slow
@pytest.mark.parametrize("name", EVERYWHERE)
def test_the_average_is_that_of_one_process(shared_workspace: Workspace, one_process: Run, name: str) -> None:
    runner, size = name.split("@")
    run = train(shared_workspace.project, name, f"run.runner={runner}", size=int(size))
    moved = shared_workspace.path / f"{name}_resumed"
    shutil.copytree(run.folder, moved)
    shutil.rmtree(moved / "checkpoints" / "step_000006")
    resumed = train(shared_workspace.project, moved.name)  # in one process, from the boxes of two
    expected, trained = weights(one_process.checkpoint(6), "ema"), weights(one_process.checkpoint(6))
    for found in (weights(other.checkpoint(6), "ema") for other in (run, resumed)):
        for key, value in expected.items():
            assert (found[key] - value).norm() <= TOLERANCE * value.norm(), key
            assert (found[key] - trained[key]).norm() > 10 * (found[key] - value).norm(), key  # no copy of the weights
    loss = run_ranks(1, _loss, str(one_process.checkpoint(6)), ())[0]
    for rank_loss in run_ranks(int(size), _loss, str(run.checkpoint(6)), (f"run.runner={runner}",)):
        assert rank_loss == pytest.approx(loss, rel=TOLERANCE)


@pytest.mark.slow
def test_one_rank_ends_the_run_of_all_and_callbacks_come_and_go(workspace: Workspace) -> None:
    path = project(workspace, {"name": "diary", "ends_after": 2}, max_iters=6)
    run = train(path, "run", size=2)
    assert "training ends after step 2: the diary is full" in (run.folder / "log.txt").read_text()
    ema = {"name": "ema", "decay": 0.9}
    train(project(workspace, ema), "run", "run.max_iters=3")
    assert "callback ema starts fresh at step 2" in (run.folder / "log.txt").read_text()
    trained = [weights(run.checkpoint(step)) for step in (2, 3)]
    average = weights(run.checkpoint(3), "ema")
    assert all(torch.equal(average[key], trained[0][key].lerp(trained[1][key], 1 - 0.9)) for key in average)
    train(project(workspace), "run", "run.max_iters=4")
    assert Reader.open(run.checkpoint(4)).kinds() == {"param", "exp_avg", "exp_avg_sq", "step"}
