"""Batch arithmetic, and options that are made in Python rather than read from a file."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crosstrain.config.batch import BatchPlan
from crosstrain.config.run_options import RunOptions
from crosstrain.config.schema import OptionError
from crosstrain.utils.errors import ConfigError


def test_an_option_error_raised_outside_a_file_still_names_its_field() -> None:
    with pytest.raises(OptionError, match=r"^min_lr: 1 is above init_lr, 0.1$"):
        RunOptions(output_dir="o", max_iters=1, micro_batch_size=1, init_lr=0.1, min_lr=1)


def batch(dp_size: int, **given: int | None) -> BatchPlan:
    return BatchPlan.of(RunOptions(output_dir="o", max_iters=1, **given), dp_size)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "dp_size", "plan"),
    [
        ({"global_batch_size": 64, "micro_batch_size": 4}, 8, (64, 4, 2)),
        ({"global_batch_size": 64, "accum_grad_iters": 2}, 8, (64, 4, 2)),
        ({"micro_batch_size": 4, "accum_grad_iters": 2}, 8, (64, 4, 2)),
        ({"global_batch_size": 64, "micro_batch_size": 4, "accum_grad_iters": 2}, 8, (64, 4, 2)),
        ({"global_batch_size": 64}, 8, (64, 8, 1)),
        ({"micro_batch_size": 4}, 8, (32, 4, 1)),
        ({"accum_grad_iters": 2}, 8, (16, 1, 2)),
    ],
)
def test_what_is_not_given_follows(given: dict[str, int], dp_size: int, plan: tuple[int, int, int]) -> None:
    assert batch(dp_size, **given) == BatchPlan(*plan, dp_size)


@pytest.mark.parametrize(
    ("given", "dp_size", "sentence"),
    [
        (
            {"global_batch_size": 10, "micro_batch_size": 4},
            1,
            "run.global_batch_size: 10 is not a multiple of 4 (4 micro_batch_size x 1 data-parallel ranks); "
            "the nearest valid global_batch_size is 8, or micro_batch_size=2 keeps 10",
        ),
        (
            {"global_batch_size": 15, "micro_batch_size": 4},
            2,
            "run.global_batch_size: 15 is not a multiple of 8 (4 micro_batch_size x 2 data-parallel ranks); "
            "the nearest valid global_batch_size is 16",
        ),
        (
            {"global_batch_size": 3},
            8,
            "run.global_batch_size: 3 is not a multiple of 8 (1 accum_grad_iters x 8 data-parallel ranks); "
            "the nearest valid global_batch_size is 8",
        ),
        (
            {"global_batch_size": 64, "micro_batch_size": 4, "accum_grad_iters": 4},
            8,
            "run.global_batch_size: 64 is not 128 "
            "(4 micro_batch_size x 4 accum_grad_iters x 8 data-parallel ranks); "
            "the nearest valid global_batch_size is 128",
        ),
    ],
)
def test_numbers_that_do_not_go_together_are_explained(given: dict[str, int], dp_size: int, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        batch(dp_size, **given)
    assert str(caught.value) == sentence


SIZES = st.none() | st.integers(1, 64)


@settings(deadline=None)
@given(SIZES, SIZES, SIZES, st.integers(1, 16))
def test_a_plan_adds_up_and_a_refusal_names_a_size_that_works(
    total: int | None, micro: int | None, accumulation: int | None, dp_size: int
) -> None:
    sizes = {"global_batch_size": total, "micro_batch_size": micro, "accum_grad_iters": accumulation}
    if not any(sizes.values()):
        return
    try:
        plan = batch(dp_size, **sizes)
    except ConfigError as error:
        nearest = int(re.findall(r"global_batch_size is (\d+)", str(error))[0])
        assert nearest != total
        plan = batch(dp_size, **{**sizes, "global_batch_size": nearest})
        assert plan.global_batch == nearest
    else:
        assert total in (None, plan.global_batch)
    assert plan.global_batch == plan.micro_batch * plan.accumulation * dp_size
    assert micro in (None, plan.micro_batch)
    assert accumulation in (None, plan.accumulation)
