"""Learning rates and loss scales of a real Megatron-LM log, from the platform's own classes."""

from __future__ import annotations

import math

import pytest

from crosstrain.config.load import load_config
from crosstrain.engine.build import make_schedule
from crosstrain.engine.precision import LossScaler
from crosstrain.utils.errors import ConfigError

# Published log of GPT-2 345M on Megatron-LM: (iterations of the run, {iteration: rate as printed}, loss scale as
# printed from the first logged line on). One GPU, two-way data parallel, two-way tensor parallel.
LOGS = [
    (320_000, {100: "3.937E-06", 200: "8.625E-06"}, 131072.0, 16),
    (300, {100: "1.258E-04", 200: "5.257E-05", 300: "1.806E-06"}, 32768.0, 18),
    (
        600,
        {100: "1.444E-04", 200: "1.210E-04", 300: "8.518E-05", 400: "4.666E-05", 500: "1.574E-05", 600: "6.939E-07"},
        8192.0,
        20,
    ),
]


@pytest.mark.parametrize(("iterations", "printed", "final_scale", "skipped"), LOGS)
def test_a_megatron_log_is_reproduced(
    iterations: int, printed: dict[int, str], final_scale: float, skipped: int
) -> None:
    config = load_config("projects/gpt2_345m.yaml", [f"run.max_iters={iterations}", "run.lr_sched=cosine_megatron_v1"])
    schedule = make_schedule(config, iterations)
    amp = config.run.amp
    scaler = LossScaler(amp.initial_scale, amp.window, amp.hysteresis, amp.min_scale)

    # Gradients fit into fp16 once the scale is as low as the log's; until then every step overflows.
    applied = 0
    rates = {}
    for iteration in range(1, max(printed) + 1):
        overflow = scaler.scale > final_scale
        scaler.update(overflow)
        applied += not overflow
        rates[iteration] = schedule(applied)
    assert {i: f"{rates[i]:.3E}" for i in printed} == printed
    assert max(printed) - applied == skipped
    assert scaler.scale == final_scale


def test_the_usual_cosine_ends_at_its_minimum() -> None:
    config = load_config("projects/gpt2_345m.yaml", ["run.min_lr=1e-5", "run.lr_decay_iters=1000"])
    schedule = make_schedule(config, 5000)
    assert schedule(10) == pytest.approx(1.5e-4)  # the end of the warmup, 1% of 1000
    assert schedule(505) == pytest.approx((1.5e-4 + 1e-5) / 2)
    assert schedule(1000) == schedule(5000) == pytest.approx(1e-5)


@pytest.mark.parametrize(("name", "half"), [("linear", 0.5), ("constant", 1.0), ("cosine", 0.5)])
def test_shapes_half_way(name: str, half: float) -> None:
    options = [f"run.lr_sched={name}", "run.warmup_fraction=0.5", "run.max_iters=100", "run.init_lr=1.0"]
    schedule = make_schedule(load_config("projects/gpt2_345m.yaml", options), 100)
    assert schedule(25) == pytest.approx(0.5)
    assert schedule(75) == pytest.approx(half)


def test_a_cooldown_follows_a_constant_rate() -> None:
    """Values of Megatron-LM's formulas, written out; the stable phase does not depend on the length of the run."""
    half = {"linear": 0.5, "cosine": 0.5, "minus_sqrt": 1 - math.sqrt(0.5), "exponential": 2 * 0.5**0.5 - 1}
    common = ["run.warmup_steps=10", "run.warmup_fraction=null", "run.init_lr=1.0", "run.min_lr=0.0"]
    for shape, middle in half.items():
        for steps in (100, 300):
            options = [
                *common,
                f"run.max_iters={steps}",
                f"run.lr_sched={{name: wsd, cooldown_steps: 20, shape: {shape}}}",
            ]
            schedule = make_schedule(load_config("projects/gpt2_345m.yaml", options), steps)
            assert [schedule(n) for n in (5, 10, 40, steps - 20)] == [0.5, 1.0, 1.0, 1.0]
            assert schedule(steps - 10) == pytest.approx(middle)
            assert schedule(steps) == schedule(steps + 50) == pytest.approx(0.0, abs=1e-12)
    schedule = make_schedule(load_config("projects/gpt2_345m.yaml", [*common, "run.lr_sched=wsd"]), 100)
    assert (schedule(80), schedule(85)) == (1.0, pytest.approx(0.5))  # the default: 1 - sqrt in the last fifth
    for long in ("cooldown_steps: 95", "cooldown_fraction: 0.95"):
        with pytest.raises(ConfigError, match="a cooldown of 95 exceed the 100 steps"):
            make_schedule(load_config("projects/gpt2_345m.yaml", [*common, f"run.lr_sched={{name: wsd, {long}}}"]), 100)


def test_scale_grows_after_a_window_and_gives_the_tolerance_back() -> None:
    scaler = LossScaler(scale=8.0, window=3, hysteresis=2, min_scale=1.0)
    scales = []
    for overflow in [True, True, False, False, False, True, True, True, True, True, True, True]:
        scaler.update(overflow)
        scales.append(scaler.scale)
    assert scales == [8, 4, 4, 4, 8, 8, 4, 2, 1, 1, 1, 1]


def test_state_of_the_scaler_survives_json() -> None:
    scaler = LossScaler(2.0**32, 1000, 2, 1.0)
    for _ in range(5):
        scaler.update(True)
    scaler.update(False)
    other = LossScaler(2.0**32, 1000, 2, 1.0)
    other.load_state(scaler.state())
    assert vars(other) == vars(scaler)


def test_perplexities_of_the_log() -> None:
    from crosstrain.inference.perplexity import LossMetrics

    half_a_digit = 5e-6  # of the losses, which the log prints to five decimals
    assert LossMetrics(11.70473, 1).perplexity == pytest.approx(121_143.7, rel=half_a_digit)
    assert LossMetrics(12.31077, 1).perplexity == pytest.approx(222_075.9, rel=half_a_digit)
    assert LossMetrics(1e4, 1).perplexity == math.inf
