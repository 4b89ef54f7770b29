"""The megatron runner: every layout trains as one process does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from conftest import Workspace
from fixtures_qwen import use
from fixtures_ranks import mostly_slow
from fixtures_training import COMMON, SETTINGS, TOLERANCE, assert_equal_training, follow, relative

LAYOUTS = [
    "megatron_tp2@2", "megatron_tp4@4", "megatron_tp2_sp@2", "megatron_tp2_pp2_sp@4", "megatron_pp2@2",
    "megatron_tp2_pp2@4", "megatron_tp2@4", "megatron_pp2@4", "megatron_tp2_zero1@4", "megatron_tp2_fsdp@4",
    "megatron_tp2_offload@2",
]  # fmt: skip
QWEN: dict[str, Any] = {
    "vocab_size": 320, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 32,
}  # fmt: skip
QUIET = "model.dropout=0"  # attention's dropout is the one thing that tensor parallelism draws anew
SIZES = ("model.n_head=4",)


@pytest.fixture(scope="module", params=mostly_slow(SETTINGS, ["adamw"]))
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, dataset: Any) -> Any:
    workspace = Workspace(tmp_path_factory.mktemp(request.param), dataset)
    options = (*COMMON, *SETTINGS[request.param], *SIZES, QUIET)
    run = follow(workspace, "ddp@1", *options)
    losses = run.column("loss")
    assert losses[-1] < 0.8 * losses[0], "nothing was learned, so nothing was compared"
    return workspace, options, run


@pytest.mark.parametrize("layout", mostly_slow(LAYOUTS, ["megatron_tp2@2"]))
def test_every_layout_trains_alike(reference: Any, layout: str) -> None:
    workspace, options, one = reference
    assert_equal_training(one, follow(workspace, layout, *options), TOLERANCE)


# ---- another family

# Rounding grows fast in qwen3's normalised queries and keys. Under AdamW with long steps one process whose step is one
# micro batch of eight samples differs from itself with eight of one by 2e-5 in gradient norms, at the steps in which
# these are largest, and by 6e-7 in losses. So that noise is measured, and the norms' tolerance there is four times as
# much, as in `crosstrain compare`; that of losses is everybody's. Under SGD the steps are short, and no more is needed.
ADAMW = ("run.optimizer=adamw", "run.init_lr=1e-2", "run.grad_norm_clip=0.3")
SGD = ("run.optimizer={name: sgd, momentum: 0.9}", "run.init_lr=0.03", "run.grad_norm_clip=0")
QWENS = {
    "tied": (True, "qwen2", ADAMW),
    "untied": (False, "qwen3", SGD),
    "noisy": (False, "qwen3", ADAMW),
}
QWEN_LAYOUTS = ["megatron_tp2@2", "megatron_tp2_sp@2", "megatron_pp2@2", "megatron_tp2_pp2_sp@4", "megatron_tp2@4"]


@pytest.fixture(scope="module", params=QWENS)
def qwen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, dataset: Any) -> Any:
    """A Qwen with grouped queries; qwen3 normalises queries and keys with weights that all heads share."""
    tied, family, settings = QWENS[request.param]
    workspace = Workspace(tmp_path_factory.mktemp(request.param), dataset)
    use(workspace, **QWEN, tie_word_embeddings=tied, family=family)
    options = (*COMMON, *settings)
    run = follow(workspace, "ddp@1", *options)
    assert run.column("loss")[-1] < 0.8 * run.column("loss")[0], "nothing was learned, so nothing was compared"
    noise = noise_of(workspace, options, run, micro_batch=8) if request.param == "noisy" else 0.0
    return workspace, options, run, max(TOLERANCE, 4 * noise)


def noise_of(workspace: Workspace, options: tuple[str, ...], one: Any, micro_batch: int) -> float:
    """How far gradient norms of one process are from those that it has with another micro batch."""
    again = follow(workspace, "ddp@1", *options, f"run.micro_batch_size={micro_batch}", label="again")
    noise = relative(again.column("grad_norm"), one.column("grad_norm"))
    assert noise < 1e-4, "this is no rounding"
    return noise


@pytest.mark.parametrize("layout", mostly_slow(QWEN_LAYOUTS, []))
def test_qwen_trains_alike(qwen: Any, layout: str) -> None:
    workspace, options, one, tolerance = qwen
    many = follow(workspace, layout, *options)
    assert_equal_training(one, many, tolerance)
    assert relative(many.column("loss"), one.column("loss")) < TOLERANCE


@pytest.mark.slow
def test_four_ranks_share_grouped_queries(tmp_path: Path, dataset: Any) -> None:
    workspace = Workspace(tmp_path, dataset)
    use(workspace, **QWEN | {"num_attention_heads": 8, "num_key_value_heads": 4}, tie_word_embeddings=True)
    options = (*COMMON, *SGD)
    assert_equal_training(
        follow(workspace, "ddp@1", *options), follow(workspace, "megatron_tp4@4", *options), TOLERANCE
    )


# ---- with and without accumulation, with and without recomputation

FULL = "run.gradient_checkpointing=full"
WHOLE = ("run.max_iters=20", "run.global_batch_size=8")  # one micro batch is the step


@pytest.fixture(scope="module", params=["gpt2", "qwen"])
def whole_batches(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, dataset: Any) -> Any:
    workspace = Workspace(tmp_path_factory.mktemp("whole"), dataset)
    options, noise = (*WHOLE, *SETTINGS["adamw"], *SIZES, QUIET), 0.0
    if request.param == "qwen":
        use(workspace, **QWEN, tie_word_embeddings=True)
        options = (*WHOLE, *ADAMW)
    one = follow(workspace, "ddp@1", *options)
    if request.param == "qwen":
        noise = noise_of(workspace, options, one, micro_batch=1)
    return workspace, options, one, max(TOLERANCE, 4 * noise)


def assert_equal_whole(whole_batches: Any, layout: str, *more: str) -> None:
    workspace, options, one, tolerance = whole_batches
    many = follow(workspace, layout, *options, *more, label="whole" if more else "run")
    assert_equal_training(one, many, tolerance)
    assert relative(many.column("loss"), one.column("loss")) < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout != "megatron_tp4@4"])
def test_without_accumulation(whole_batches: Any, layout: str) -> None:
    assert_equal_whole(whole_batches, layout)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["megatron_tp2_sp@2", "megatron_pp2@2", "megatron_tp2_pp2@4", "megatron_tp2@4"])
def test_recomputation_without_accumulation(whole_batches: Any, layout: str) -> None:
    assert_equal_whole(whole_batches, layout, FULL)


@pytest.mark.slow
@pytest.mark.parametrize("reference", ["adamw"], indirect=True)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_recomputation_changes_nothing(reference: Any, layout: str) -> None:
    workspace, options, one = reference
    assert_equal_training(one, follow(workspace, layout, *options, FULL, label="full"), TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("reference", ["adamw"], indirect=True)
@pytest.mark.parametrize("mode", ["selective", "offload"])
@pytest.mark.parametrize("layout", ["megatron_tp2_sp@2", "megatron_tp2_pp2@4", "megatron_tp2_fsdp@4"])
def test_other_ways_to_keep_activations_change_nothing(reference: Any, layout: str, mode: str) -> None:
    workspace, options, one = reference
    many = follow(workspace, layout, *options, f"run.gradient_checkpointing={mode}", label=mode)
    assert_equal_training(one, many, TOLERANCE)
