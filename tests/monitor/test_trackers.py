"""Trackers: chosen in YAML, added by plugins, and never in the way of a training."""

from __future__ import annotations

import importlib.util
import json
import os
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from conftest import ENVIRONMENT, Workspace
from crosstrain.config.load import load_config
from crosstrain.config.registry import registry
from crosstrain.config.run_options import RunOptions
from crosstrain.config.schema import Component, NoOptions, OptionError
from crosstrain.inference.open_checkpoint import saved_config
from crosstrain.monitor import tracker
from crosstrain.monitor.metrics import scalars
from crosstrain.monitor.tracker import IsolatedTracker, TrackedRun, Tracker, check_trackers
from crosstrain.utils.errors import UserError
from fixtures_ranks import train

OURS = '''
import json
from dataclasses import dataclass

from crosstrain.monitor.metrics import scalars
from crosstrain.monitor.tracker import Tracker
from crosstrain.config.registry import registry


@registry.register_tracker("notebook")
class Notebook(Tracker):
    """One list of numbers in a file."""

    @dataclass
    class Options:
        file: str = "notes.json"

    def __init__(self, options, run):
        super().__init__(options, run)
        self.seen = {"resumed": run.resumed_step, "run": run.name, "seed": run.config["run"]["seed"], "rows": []}

    def log(self, row):
        self.seen["rows"].append({"step": row["step"], **dict(scalars(row))})

    def close(self, finished):
        (self.run.folder / self.options.file).write_text(json.dumps(self.seen | {"finished": finished}))


@registry.register_tracker("offline_forever")
class Failing(Tracker):
    """A network that is down."""

    def log(self, row):
        raise ConnectionError(f"no route to host at step {row['step']}")

    def close(self, finished):
        raise ConnectionError("still no route to host")
'''
PLUGIN = "run.plugins=[more]"


@pytest.fixture
def plugin(workspace: Workspace) -> Workspace:
    (workspace.path / "more").mkdir()
    (workspace.path / "more" / "ours.py").write_text(OURS)
    return workspace


def test_a_plugin_tracks_what_metrics_jsonl_holds_and_a_failing_one_stops_nothing(plugin: Workspace) -> None:
    named = "run.trackers=[offline_forever, {name: notebook, file: n.json}]"
    run = train(plugin.project, "out", PLUGIN, named, "run.max_iters=3", "run.eval_interval=3", "run.eval_iters=1")
    seen = json.loads((run.folder / "n.json").read_text())
    assert seen["rows"] == [{"step": row["step"], **dict(scalars(row))} for row in run.rows]
    assert len(seen["rows"]) == 3
    assert "val/loss" in seen["rows"][-1]
    assert (seen["resumed"], seen["run"], seen["seed"], seen["finished"]) == (0, "out", 1234, True)
    assert not (run.folder / "tensorboard").exists()
    complaints = [line for line in (run.folder / "log.txt").read_text().splitlines() if "offline_forever" in line]
    assert len(complaints) == 1
    assert "failed (ConnectionError: no route to host at step 1); training continues" in complaints[0]
    # Its checkpoint can be evaluated where nobody knows these trackers.
    saved = json.loads((run.checkpoint(3) / "state.json").read_text())["config"]["run"]["trackers"]
    assert [tracker["name"] for tracker in saved] == ["jsonl", "offline_forever", "notebook"]
    assert [tracker.name for tracker in saved_config(run.checkpoint(3), []).run.trackers] == ["jsonl", "tensorboard"]


def test_metrics_jsonl_is_written_whatever_is_named(workspace: Workspace) -> None:
    config = load_config(workspace.project, ["run.trackers=[]"])
    assert [tracker["name"] for tracker in config.plain["run"]["trackers"]] == ["jsonl"]
    assert [t.name for t in load_config(workspace.project, []).run.trackers] == ["jsonl", "tensorboard"]


@pytest.mark.parametrize(
    ("written", "sentence"),
    [
        ("[tensorbord]", "run.trackers.0.name: there is no tracker called 'tensorbord'; did you mean tensorboard?"),
        ("[{name: mlflow, experimnt: x}]", "unknown key; did you mean run.trackers.0.experiment?"),
        ("[{name: wandb, mode: disabled}]", "run.trackers.0.mode: expected one of online, offline or null, got"),
        ("tensorboard", "run.trackers: expected a list of the tracker's name, or a mapping with its name and options"),
    ],
)
def test_a_mistake_is_one_sentence(workspace: Workspace, written: str, sentence: str) -> None:
    with pytest.raises(UserError, match=r"run\.trackers") as caught:
        load_config(workspace.project, [f"run.trackers={written}"])
    assert sentence in str(caught.value)


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_missing_package_is_named_with_its_extra(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    options = registry.get("tracker", name).Options()
    with pytest.raises(UserError) as caught:
        check_trackers([Component(name, options)])
    assert str(caught.value) == (
        f"run.trackers: tracker {name!r} needs the package {name}, which is not installed; "
        f"run: pip install 'crosstrain[{name}]'"
    )


def test_a_tracker_that_is_named_twice_is_refused() -> None:
    with pytest.raises(OptionError, match=r"^trackers: jsonl is listed twice$"):
        RunOptions("out", max_iters=1, global_batch_size=1, trackers=[Component("jsonl"), Component("jsonl")])


class Stuck(Tracker):
    """Over a network that has stopped answering."""

    remote = True
    release: threading.Event
    seen: list[Any]

    def log(self, row: dict[str, Any]) -> None:
        self.release.wait()
        self.seen.append((row["step"], threading.current_thread() is threading.main_thread()))

    def close(self, finished: bool) -> None:
        self.seen.append(finished)


@pytest.fixture
def stuck(monkeypatch: pytest.MonkeyPatch) -> type[Stuck]:
    """The tracker of this test alone, because a thread of another may still be at work with its own."""
    made = type("StuckHere", (Stuck,), {"release": threading.Event(), "seen": []})
    monkeypatch.setattr(registry, "get", lambda _kind, _name: made)
    return made


def test_a_network_that_hangs_holds_nothing_up(
    stuck: type[Stuck], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tracker, "_CLOSE_SECONDS", 0.2)
    tracking = IsolatedTracker(Component("stuck", NoOptions()), TrackedRun(tmp_path, {}, 0))
    started = time.monotonic()
    for step in range(1, tracker._MAX_BACKLOG + 50):
        tracking.call(lambda t, step=step: t.log({"step": step}))
    tracking.call(lambda t: t.close(finished=True))
    tracking.join()
    assert time.monotonic() - started < 5
    assert list(dict.fromkeys(record.getMessage() for record in caplog.records)) == [
        "run.trackers: stuck is more than 1000 rows behind; training continues, and rows are lost",
        "run.trackers: stuck did not accept the last rows within 0 s; some may be missing",
    ]
    stuck.release.set()


def test_a_slow_network_gets_every_row_in_order(stuck: type[Stuck], tmp_path: Path) -> None:
    tracking = IsolatedTracker(Component("stuck", NoOptions()), TrackedRun(tmp_path, {}, 0))
    for step in range(1, 4):
        tracking.call(lambda t, step=step: t.log({"step": step}))
    threading.Timer(0.3, stuck.release.set).start()
    tracking.call(lambda t: t.close(finished=False))
    tracking.join()
    assert stuck.seen == [(1, False), (2, False), (3, False), False]


def test_a_run_remembers_its_id_at_each_tracker(tmp_path: Path) -> None:
    made = iter(["first", "second"])
    run = TrackedRun(tmp_path, {}, 0)
    assert run.remembered("a", lambda: next(made)) == "first"
    assert run.remembered("b", lambda: next(made)) == "second"
    (tmp_path / "a" / "run_id").write_text("first\n")
    assert TrackedRun(tmp_path, {}, 8).remembered("a", lambda: next(made)) == "first"


def installed(package: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(importlib.util.find_spec(package) is None, reason=f"{package} is not installed")


def interrupted_and_resumed(workspace: Workspace, tracker: str, env: dict[str, str]) -> Path:
    """Six steps with a checkpoint at three; what was logged beyond it is told again by the run that resumes."""
    common = [f"run.trackers=[jsonl, {tracker}]", "run.eval_iters=1", "run.eval_interval=3", "run.save_interval=3"]
    first = workspace.train("out", "run.max_iters=6", "run.lr_decay_iters=8", *common, env=env)
    for file in sorted(first.checkpoint(6).iterdir()):
        file.unlink()
    first.checkpoint(6).rmdir()
    (workspace.path / "out" / "checkpoints" / "latest").unlink()
    second = workspace.train("out", "run.max_iters=8", "run.lr_decay_iters=8", *common, env=env)
    assert "at step 3" in second.out
    assert second.column("step") == list(range(1, 9))
    for run in (first, second):
        assert "run.trackers" not in run.out + run.err, run.out  # no complaint
    return second.folder


@pytest.mark.slow
@installed("wandb")
def test_weights_and_biases_offline_goes_on_as_the_same_run(workspace: Workspace) -> None:
    env = {"WANDB_MODE": "offline", "HOME": str(workspace.path)}
    folder = interrupted_and_resumed(workspace, "{name: wandb, project: mine, tags: [a]}", env)
    run_id = (folder / "wandb" / "run_id").read_text()
    parts = sorted((folder / "wandb").glob(f"offline-run-*-{run_id}/run-{run_id}.wandb"))
    assert len(parts) == 2
    assert len(list((folder / "wandb").glob("offline-run-*"))) == 2
    told = [wandb_history(part) for part in parts]
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["_step"] for row in told[0]] == list(range(1, 7))
    assert [row["_step"] for row in told[1]] == list(range(4, 9))
    for row in (*told[0][:3], *told[1]):
        (ours,) = (r for r in rows if r["step"] == row["_step"])
        assert {tag: row[tag] for tag, _ in scalars(ours)} == dict(scalars(ours))


def wandb_history(file: Path) -> list[dict[str, Any]]:
    """Rows of an offline run, in the package's own form: LevelDB's log of protocol buffers, 7 bytes in front."""
    from wandb.proto import wandb_internal_pb2

    data, at, whole, rows = file.read_bytes(), 7, b"", []
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:  # what is left of a block that has no room for a header
            at += 32768 - at % 32768
            continue
        size, kind = struct.unpack_from("<HB", data, at + 4)
        whole, at = whole + data[at + 7 : at + 7 + size], at + 7 + size
        if kind in (1, 4):  # the whole of a record, or the last part of one
            record = wandb_internal_pb2.Record()
            record.ParseFromString(whole)
            items, whole = record.history.item, b""
            if items:
                rows.append({i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in items})
    return rows


@pytest.mark.slow
@installed("wandb")
def test_weights_and_biases_without_a_login_is_one_sentence(workspace: Workspace) -> None:
    env = {"HOME": str(workspace.path), "WANDB_MODE": "online", "WANDB_API_KEY": ""}
    run = workspace.train("out", "run.trackers=[wandb]", fails=True, env=env)
    assert run.code == 1
    assert run.err.strip().splitlines()[-1] == (
        "error: run.trackers: wandb is not logged in; run `wandb login`, set WANDB_API_KEY, or set mode: offline"
    )
    assert not run.folder.exists()


@pytest.mark.slow
@installed("wandb")
def test_weights_and_biases_that_cannot_be_reached_stops_nothing(workspace: Workspace) -> None:
    env = {"HOME": str(workspace.path), "WANDB_API_KEY": "0" * 40, "WANDB_BASE_URL": "http://127.0.0.1:9"}
    run = workspace.train("out", "run.trackers=[wandb]", "run.max_iters=3", env=env | {"WANDB_INIT_TIMEOUT": "5"})
    assert run.column("step") == [1, 2, 3]
    assert run.checkpoint(3).is_dir()
    assert run.out.count("run.trackers: wandb ") in (1, 2)  # it failed, or was still waiting in the end


@pytest.mark.slow
@installed("mlflow")
@pytest.mark.parametrize("where", ["in the run's folder", "elsewhere"])
def test_mlflow_goes_on_as_the_same_run(workspace: Workspace, where: str) -> None:
    database = workspace.path / "elsewhere.db"
    tracker = "mlflow" if where != "elsewhere" else f"{{name: mlflow, uri: 'sqlite:///{database}', experiment: mine}}"
    folder = interrupted_and_resumed(workspace, tracker, {"MLFLOW_TRACKING_URI": ""})
    database = database if where == "elsewhere" else folder / "mlflow" / "mlflow.db"
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    program = f"""
import json
from mlflow.tracking import MlflowClient
client = MlflowClient(tracking_uri="sqlite:///{database}")
runs = [r for e in client.search_experiments() for r in client.search_runs([e.experiment_id])]
(run,) = runs
history = lambda tag: [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, tag)]
curves = {{tag: history(tag) for tag in run.data.metrics}}
print(json.dumps([run.info.run_name, run.info.status, run.data.params, curves]))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=ENVIRONMENT, check=True)
    name, status, parameters, curves = json.loads(done.stdout.splitlines()[-1])
    assert (name, status, parameters["run.seed"]) == ("out", "FINISHED", "1234")
    assert (folder / "mlflow" / "run_id").exists()
    loss = dict(map(tuple, curves["train/loss"]))
    assert len(curves["train/loss"]) == len(loss) == 8  # no step stands twice
    # A run resumed on the CPU repeats its steps to the bit, so it does not matter which of the two was kept.
    assert loss == {row["step"]: row["loss"] for row in rows}


@pytest.mark.slow
@installed("mlflow")
def test_an_mlflow_server_that_is_down_stops_nothing(workspace: Workspace) -> None:
    env = {"MLFLOW_TRACKING_URI": "http://127.0.0.1:9", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"}
    run = workspace.train("out", "run.trackers=[mlflow]", "run.max_iters=3", env=env)
    assert run.column("step") == [1, 2, 3]
    assert run.out.count("run.trackers: mlflow failed (") == 1, run.out
    assert os.listdir(run.folder / "checkpoints")
