"""What a run leaves to look at."""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from conftest import Workspace
from crosstrain.config.registry import registry
from crosstrain.monitor.tracker import TrackedRun
from crosstrain.utils.timers import Timers
from fixtures_ranks import train


def test_metrics_are_cut_back_to_the_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    rows = [{"step": step, "loss": 1.0 / step} for step in range(1, 8)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 8, "lo')
    tracker = registry.get("tracker", "jsonl")(None, TrackedRun(tmp_path, {}, resumed_step=5))
    tracker.log({"step": 6, "loss": 0.5})
    tracker.close(finished=True)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3, 4, 5, 6]


def test_timers_add_up_and_start_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([0.0, 1.0, 10.0, 12.5, 20.0, 26.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(now))
    timers = Timers()
    for _ in range(2):
        with timers("forward"):
            pass
    assert timers.seconds == {"forward": 3.5}
    timers.reset(synchronize=False)
    assert timers.seconds == {}
    assert timers.since_reset == 6.0


def test_tensorboard_has_curves_timers_and_the_configuration(workspace: Workspace) -> None:
    validated = ("run.eval_interval=3", "run.eval_iters=1", "run.log=megatron")
    run = train(workspace.project, "out", *validated, "run.max_iters=6", "run.save_interval=3")
    (
        run.folder / "checkpoints" / "latest"
    ).unlink()  # a pointer is a convenience: the folders themselves are what counts
    train(workspace.project, "out", *validated, "run.max_iters=9")

    events = EventAccumulator(str(run.folder / "tensorboard"))
    events.Reload()
    tags = set(events.Tags()["scalars"])
    assert {f"train/{name}" for name in ("loss", "lr", "grad_norm", "loss_scale", "tokens_per_second")} <= tags
    assert {f"timers_ms/{name}" for name in ("forward", "backward", "optimizer", "data loader")} <= tags
    assert {"val/loss", "val/perplexity", "train/memory_peak_mb"} <= tags
    assert [e.step for e in events.Scalars("train/loss")] == list(range(1, 10))
    validated = [row["val_loss"] for row in run.rows if "val_loss" in row]
    # TensorBoard keeps single precision.
    assert [e.value for e in events.Scalars("val/loss")] == [np.float32(loss) for loss in validated]
    assert "config/text_summary" in events.Tags()["tensors"]
    assert (run.folder / "config.yaml").read_text().startswith("model:")
    log = (run.folder / "log.txt").read_text()
    assert "memory (MB) | allocated:" in log
    assert "resuming" in log
