"""`crosstrain status`: what runs of every end say from their folders."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from conftest import Workspace, kill, logged_step, wait_until
from crosstrain.cli.main import main
from fixtures_processes import start_as_user, train_as_user


def said(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["status", *words]) == 0
    return capsys.readouterr().out


def states(capsys: pytest.CaptureFixture[str], folder: Path) -> dict[str, dict[str, Any]]:
    rows = map(json.loads, said(capsys, str(folder), "--json").splitlines())
    return {Path(row["run"]).name: row for row in rows}


def test_a_run_trains_dies_or_finishes(workspace: Workspace, capsys: pytest.CaptureFixture[str]) -> None:
    train_as_user(workspace, "runs/finished", "run.max_iters=4", "run.save_interval=2")
    process = start_as_user(workspace, "runs/died", "run.max_iters=1000000")
    wait_until(lambda: logged_step(workspace.path / "runs" / "died") >= 3, process)
    seen = states(capsys, workspace.path)["died"]
    assert (seen["state"], seen["max_iters"]) == ("running", 1000000)
    kill(process)
    found = states(capsys, workspace.path / "runs")
    assert [(name, row["state"]) for name, row in found.items()] == [(name, name) for name in ("died", "finished")]
    assert (found["finished"]["step"], found["finished"]["checkpoint"]) == (4, 4)
    assert found["finished"]["last_line"].startswith("saved runs/finished/checkpoints/step_000004 in ")
    assert found["died"]["checkpoint"] is None
    refused = train_as_user(workspace, "runs/finished", "model.n_embd=64", fails=True)
    assert refused.code == 1
    assert "changed since step_000004: model.n_embd 32 -> 64" in refused.out
    assert states(capsys, workspace.path / "runs")["finished"]["state"] == "finished"
    assert "n_embd: 32" in (workspace.path / "runs/finished/config.yaml").read_text()
    table = said(capsys, str(workspace.path)).splitlines()
    assert table[0].split()[:6] == ["run", "state", "step", "loss", "saved", "logged"]
    assert table[2].split()[1:3] == ["finished", "4/4"]


def test_what_is_half_written_or_hostile_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", str(tmp_path)]) == 1
    assert "no run found in or below" in capsys.readouterr().err
    assert main(["status", "s3://bucket/runs"]) == 1
    assert "`crosstrain report` reads a run in a bucket" in capsys.readouterr().err
    for name in ("bare", "odd", "fifo"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").write_text("[" * 5000 if name == "odd" else "run: {max_iters: 9}")
        (tmp_path / name / "log.txt").write_text("2026-01-01 00:00:00 \x1b[2Jcleared\nno stamp\n")
    (tmp_path / "odd" / "metrics.jsonl").write_text('{"step": 7, "loss": 2.5}\n{"step": "8"}\n{"step": 9, "lo')
    (tmp_path / "odd" / "checkpoints").mkdir()
    (tmp_path / "odd" / "checkpoints" / "latest").write_text("../../etc")
    (tmp_path / "fifo" / "log.txt").unlink()
    os.mkfifo(tmp_path / "fifo" / "log.txt")
    os.mkfifo(tmp_path / "odd" / ".lock")
    assert main(["status", str(tmp_path)]) == 0
    table, notes = capsys.readouterr()
    assert "fifo: its log cannot be read (not a regular file)" in notes
    assert "\x1b" not in table
    found = states(capsys, tmp_path / "odd") | states(capsys, tmp_path / "bare")
    assert [found["odd"][key] for key in ("state", "step", "loss", "max_iters", "checkpoint")] == [
        "died",
        7,
        2.5,
        None,
        None,
    ]
    assert [found["bare"][key] for key in ("step", "loss", "max_iters")] == [None, None, 9]
