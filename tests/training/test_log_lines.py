"""A logged step for people, and in the notation of Megatron-LM's log."""

from __future__ import annotations

import re

import pytest

from conftest import Workspace
from crosstrain.config.run_options import LogOptions
from crosstrain.monitor.metrics import StepMetrics
from crosstrain.training.log_lines import log_lines

METRICS = StepMetrics(
    step=20,
    loss=6.8163,
    lr=7.5e-4,
    grad_norm=1.2249,
    loss_scale=1.0,
    samples=320,
    skipped_steps=0,
    step_ms=571.6,
    tokens_per_second=7164.2,
    timers={"forward": 213.71, "backward": 350.0},
    memory={"memory_allocated_mb": 900.0, "memory_peak_mb": 1049.0},
)


def test_a_step_is_one_line() -> None:
    assert log_lines(METRICS, 400, LogOptions()) == [
        "step  20/400  loss 6.816  lr 7.5e-04  grad_norm 1.22  7,164 tok/s  572 ms  1.1 GB  eta 3:37"
    ]


@pytest.mark.parametrize(
    ("ms", "eta"), [(100.0, "0:38"), (20_000.0, "2:06:40"), (1_000_000.0, "4 days, 9:33:20"), (13.0, "0:05")]
)
def test_the_time_that_is_left(ms: float, eta: str) -> None:
    metrics = StepMetrics(**vars(METRICS) | {"step_ms": ms})
    assert log_lines(metrics, 400, LogOptions())[0].endswith(f"  eta {eta}")
    assert "eta" not in log_lines(metrics, 20, LogOptions())[0]


def test_numbers_that_not_every_step_has() -> None:
    changes = {"loss": None, "loss_scale": 65536.0, "skipped_steps": 3, "mfu": 0.4123, "recorded": {"accuracy": 0.25}}
    (line,) = log_lines(StepMetrics(**vars(METRICS) | changes), 400, LogOptions())
    assert "loss overflow  " in line
    assert "  loss_scale 65536  accuracy 0.25  skipped 3  " in line
    assert "  MFU 41.2%  " in line
    small = StepMetrics(**vars(METRICS) | {"loss": 0.0012345, "tokens_per_second": None, "samples_per_second": 12.34})
    assert "loss 0.001234  " in log_lines(small, 400, LogOptions())[0]
    assert "  12.3 samples/s  " in log_lines(small, 400, LogOptions())[0]


def test_megatrons_notation_and_timers() -> None:
    timers = "time (ms) | forward: 213.71 | backward: 350.00"
    assert log_lines(METRICS, 400, LogOptions(format="megatron")) == [
        "iteration       20/     400 | elapsed time per iteration (ms): 571.6 | learning rate 7.500E-04 | "
        "lm loss 6.816300E+00 | loss scale 1.0 | grad norm 1.225 | tokens/s 7164",
        timers,
    ]
    assert log_lines(METRICS, 400, LogOptions(timers=True), first=True)[1:] == [timers]
    memory = "memory (MB) | allocated: 900.0 | peak: 1049.0"
    assert log_lines(METRICS, 400, LogOptions(format="megatron"), first=True)[1:] == [timers, memory]


@pytest.mark.slow
def test_a_run_logs_as_its_project_says(workspace: Workspace) -> None:
    plain = workspace.train("plain", "run.max_iters=2")
    assert len(re.findall(r"\bstep +[12]/2  loss \d", plain.out)) == 2
    assert "time (ms)" not in plain.out
    megatron = workspace.train("megatron", "run.max_iters=2", "run.log=megatron")
    assert len(re.findall(r"iteration +[12]/ +2 \| .* lm loss \d", megatron.out)) == 2
    assert "memory (MB) | " in megatron.out
    assert [row["loss"] for row in plain.rows] == [row["loss"] for row in megatron.rows]
