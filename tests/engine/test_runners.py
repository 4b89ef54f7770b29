"""The product's sentence: the runner changes nothing. Every runner against ddp on one worker."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from conftest import ROOT, Run, Workspace
from crosstrain.checkpoint.files import Reader
from crosstrain.config.load import load_config
from crosstrain.engine.checks import batch_plan
from crosstrain.utils.errors import ConfigError
from fixtures_ranks import make_trainer, mostly_slow, run_ranks
from fixtures_training import COMMON, HALF_TOLERANCE, SETTINGS, TOLERANCE, assert_equal_training, follow, relative

try:
    import deepspeed  # noqa: F401

    NVME = Path("/usr/include/libaio.h").exists()
except ImportError:  # pragma: no cover
    NVME = False


def nvme(folder: Path) -> list[str]:
    """Options that make a small model's state go to a folder that stands for a device."""
    return [
        f"run.runner.offload_optimizer.nvme_path={folder}/nvme",
        f"run.runner.offload_param.nvme_path={folder}/nvme",
        "run.runner.offload_param.buffer_size=1000000",
        "model.n_embd=256",  # what is under a MiB per rank is never moved
        "run.init_lr=5e-4",
    ]


OTHERS = [
    "ddp@2", "fsdp@2", "zero0@2", "zero1@2", "zero2@2", "zero3@2", "zero1@4", "zero2@4", "zero3@4", "zero2_offload@2",
    "zero3_offload@2",
]  # fmt: skip


@pytest.fixture(scope="module", params=mostly_slow(list(SETTINGS), ["adamw"]))
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, dataset: Path) -> Any:
    workspace = Workspace(tmp_path_factory.mktemp(request.param), dataset)
    options = (*COMMON, *SETTINGS[request.param])
    run = follow(workspace, "ddp@1", *options)
    losses = run.column("loss")
    assert losses[-1] < 0.8 * losses[0], "nothing was learned, so nothing was compared"
    return workspace, options, run


@pytest.mark.parametrize("other", mostly_slow(OTHERS, ["fsdp@2", "zero3@2"]))
def test_every_runner_trains_alike(reference: Any, other: str) -> None:
    workspace, options, one = reference
    assert_equal_training(one, follow(workspace, other, *options), TOLERANCE)


@pytest.mark.slow
def test_the_tolerance_is_four_times_the_noise_of_one_process(reference: Any) -> None:
    """Micro batches taken in reverse order are the same training but for rounding."""
    workspace, options, _ = reference
    folder = workspace.path / "reversed"
    run_ranks(1, _train_in_reverse, str(workspace.project), (f"run.output_dir={folder}", *options, "model.dropout=0"))
    plain = follow(workspace, "ddp@1", *options, "model.dropout=0", label="plain")
    noise = max(relative(Run(folder).column(key), plain.column(key)) for key in ("loss", "grad_norm"))
    assert 0 < 4 * noise < TOLERANCE


def _train_in_reverse(project: str, options: tuple[str, ...]) -> None:
    from crosstrain.config.load import load_config
    from crosstrain.engine.runner import Runner
    from crosstrain.training.worker import train_worker

    forward = Runner.forward_backward
    Runner.forward_backward = lambda self, batches, targets: forward(self, batches[::-1], targets)  # type: ignore
    train_worker(load_config(project, options).plain, True)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["full", "selective", "offload"])
@pytest.mark.parametrize("other", ["fsdp@2", "zero2@2", "zero3@2"])
def test_gradient_checkpointing_under_sharding(reference: Any, other: str, mode: str) -> None:
    workspace, options, one = reference
    if (other, mode) == ("zero3@2", "selective"):
        config = load_config(
            str(workspace.project), [*options, "run.runner=zero3", f"run.gradient_checkpointing={mode}"]
        )
        with pytest.raises(ConfigError, match="selective and ZeRO stage 3 exclude each other"):
            batch_plan(config, 2)
        return
    many = follow(workspace, other, *options, f"run.gradient_checkpointing={mode}", label=mode)
    assert_equal_training(one, many, TOLERANCE)


@pytest.mark.slow
def test_selective_checkpointing_in_bf16_on_one_rank(reference: Any) -> None:
    """FSDP's hooks inside a block record other profiler marks in the backward than in the forward."""
    workspace, options, _ = reference
    options = (*options, "run.amp=bf16", "run.gradient_checkpointing=selective", "run.max_iters=2")
    one = follow(workspace, "ddp@1", *options, label="selective_bf16")
    assert_equal_training(one, follow(workspace, "fsdp@1", *options, label="selective_bf16"), TOLERANCE)


@pytest.mark.parametrize("accumulation", mostly_slow([1, 4], []))
def test_a_module_that_is_used_twice_has_the_sum_of_its_gradients(workspace: Workspace, accumulation: int) -> None:
    """https://github.com/deepspeedai/DeepSpeed/issues/8224: ZeRO 1 and 2 lost the gradient of one of the uses."""
    workspace.config["run"]["plugins"] = [str(ROOT / "tests" / "third_party")]
    workspace.config["model"]["arch"] = "used_twice"
    workspace.project.write_text(json.dumps(workspace.config))
    options = ("run.max_iters=4", "run.micro_batch_size=1", f"run.global_batch_size={2 * accumulation}")
    one = follow(workspace, "ddp@1", *options)
    for other in ("zero1@2", "zero2@2", "zero3@2", "fsdp@2"):
        assert_equal_training(one, follow(workspace, other, *options), TOLERANCE)


@pytest.fixture(scope="module")
def partly_used(tmp_path_factory: pytest.TempPathFactory, dataset: Path) -> Any:
    """A model with a parameter that every other step does without."""
    workspace = Workspace(tmp_path_factory.mktemp("partly"), dataset)
    workspace.config["run"]["plugins"] = [str(ROOT / "tests" / "third_party")]
    workspace.config["model"]["arch"] = "partly_used"
    workspace.project.write_text(json.dumps(workspace.config))
    options = ("run.max_iters=8", "run.micro_batch_size=1", "run.global_batch_size=8", "run.init_lr=1e-2")
    return workspace, options, follow(workspace, "ddp@1", *options, "model.period=8")


@pytest.mark.parametrize("other", mostly_slow(["ddp@2", "fsdp@2", "zero1@2", "zero2@2", "zero3@2"], []))
def test_a_parameter_that_takes_no_part_has_a_zero_gradient(partly_used: Any, other: str) -> None:
    workspace, options, one = partly_used
    more = ("run.runner.find_unused_parameters=true",) if other == "ddp@2" else ()
    many = follow(workspace, other, *options, "model.period=4", *more)
    assert_equal_training(one, many, TOLERANCE)


@pytest.mark.parametrize(
    "more",
    [
        ("model.period=4", "run.max_iters=8"),  # whole steps without it
        ("model.period=1", "run.max_iters=1"),  # the last micro batch of the only step
        ("model.period=1", "run.max_iters=2", "run.global_batch_size=2"),
    ],
)
def test_plain_ddp_names_the_parameters_that_take_no_part(partly_used: Any, more: tuple[str, ...]) -> None:
    workspace, options, _ = partly_used
    sentence = (
        r"TrainingError: extra took no part in the loss of a micro batch.*"
        r"run.runner: \{name: ddp, find_unused_parameters: true\}"
    )
    with pytest.raises(AssertionError, match=sentence):
        follow(workspace, "ddp@2", *options, *more, label="unused")


@pytest.mark.slow
def test_plain_ddp_says_it_in_one_sentence_and_leaves(partly_used: Any) -> None:
    workspace, options, _ = partly_used
    workspace.project.write_text(json.dumps(workspace.config))
    run = workspace.train("plain", *options, "model.period=1", nproc=2, fails=True)
    assert run.code == 1
    assert run.err.count("error:") == 1, run.err
    assert "find_unused_parameters: true" in run.err
    assert "Traceback" not in run.err


@pytest.mark.slow
@pytest.mark.parametrize("other", ["zero2_offload@2", "zero3_offload@2"])
def test_offloading_refuses_a_parameter_that_takes_no_part(partly_used: Any, other: str) -> None:
    workspace, options, _ = partly_used
    with pytest.raises(AssertionError, match="extra took no part in the loss of a micro batch"):
        follow(workspace, other, *options, "model.period=1")


HALF = ("run.max_iters=20", "run.micro_batch_size=2", "run.global_batch_size=8", "model.dropout=0.1")


@pytest.fixture(scope="module")
def half(tmp_path_factory: pytest.TempPathFactory, dataset: Path) -> Any:
    workspace = Workspace(tmp_path_factory.mktemp("half"), dataset)
    return workspace, {dtype: follow(workspace, "ddp@1", *HALF, amp, label=dtype) for dtype, amp in AMP.items()}


# fp16 begins where the first steps overflow, and grows again soon.
AMP = {"bf16": "run.amp=bf16", "fp16": "run.amp={dtype: fp16, initial_scale: 67108864, window: 3, hysteresis: 1}"}


HALVES = [(other, amp) for other in ("fsdp@2", "zero0@2", "zero2@2", "zero3@2") for amp in AMP]


@pytest.mark.parametrize("case", mostly_slow(HALVES, []))
def test_half_precision_means_the_same_everywhere(half: Any, case: tuple[str, str]) -> None:
    workspace, ones = half
    other, amp = case
    one = ones[amp]
    many = follow(workspace, other, *HALF, AMP[amp], label=amp)
    assert many.column("loss_scale") == one.column("loss_scale")
    assert many.column("skipped_steps") == one.column("skipped_steps")
    assert relative(many.column("loss"), one.column("loss")) < HALF_TOLERANCE
    assert amp != "fp16" or 0 < one.rows[-1]["skipped_steps"] < 10, "no overflow, so the scaler was not tested"


@pytest.mark.skipif(not NVME, reason="needs deepspeed and libaio's headers")
@pytest.mark.slow
def test_state_on_nvme_trains_alike(workspace: Workspace) -> None:
    options = (*COMMON, *SETTINGS["adamw"], *nvme(workspace.path)[3:])
    one = follow(workspace, "ddp@1", *options)
    other = follow(workspace, "zero3_nvme@2", *options, *nvme(workspace.path)[:3])
    assert_equal_training(one, other, TOLERANCE)
    assert not list((workspace.path / "nvme").iterdir()), "scratch stays behind"
    folder = f"run.output_dir={workspace.path}/swapping"
    swapping = (*options, *nvme(workspace.path)[:3], "run.runner=zero3_nvme", folder)
    assert min(run_ranks(2, _swapped_files, str(workspace.project), swapping)) > 0, "nothing was ever moved"


# A rank's part of a matrix has at least a MiB from width 384 on; DeepSpeed moves no smaller ones.
WIDTHS = {"0.2M": ("model.n_layer=4", "model.n_embd=64"), "2M": ("model.n_layer=1", "model.n_embd=384"),
          "7.4M": ("model.n_layer=4", "model.n_embd=384"), "14M": ("model.n_layer=2", "model.n_embd=768")}  # fmt: skip


@pytest.mark.skipif(not NVME, reason="needs deepspeed and libaio's headers")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "more"),
    [
        *((size, ()) for size in WIDTHS), ("7.4M", ("run.gradient_checkpointing=full",)),
        ("7.4M", ("run.runner.sub_group_size=500000",)),
        ("7.4M", ("run.runner.offload_param.buffer_count=40",)), ("7.4M", ("run.runner.offload_param.max_in_cpu=1e6",)),
        ("7.4M", ("run.runner.stage3_prefetch_bucket_size=4000000", "run.runner.stage3_max_reuse_distance=1000000")),
    ],
)  # fmt: skip
def test_parameters_on_nvme_train_alike(workspace: Workspace, size: str, more: tuple[str, ...]) -> None:
    options = (*COMMON, *SETTINGS["adamw"], *WIDTHS[size], "run.init_lr=5e-4")
    one = follow(workspace, "ddp@1", *options)
    device = [option for option in nvme(workspace.path) if option.endswith("/nvme")]
    options = (*options, *device, "run.runner.offload_param.max_in_cpu=0", *more)
    other = follow(workspace, "zero3_nvme@2", *options)
    assert_equal_training(one, other, TOLERANCE)
    folder = f"run.output_dir={workspace.path}/swapping"
    ranks = run_ranks(2, _parameters_on_disk, str(workspace.project), (*options, "run.runner=zero3_nvme", folder))
    large = {rank: expected for rank, (expected, _) in enumerate(ranks)}
    for rank, (_, found) in enumerate(ranks):
        assert found == large[rank], "every parameter of at least a MiB per rank is on disk, and no other"
    assert all(large.values()) == (size != "0.2M")


def _parameters_on_disk(project: str, options: tuple[str, ...]) -> tuple[set[str], set[str]]:
    """Names of this rank's parameters of at least a MiB, and those whose memory is elsewhere after two steps."""
    from deepspeed.runtime.swap_tensor.partitioned_param_swapper import PartitionedParamStatus

    trainer = make_trainer(project, options)
    batches = trainer.batches()
    for _ in range(2):
        trainer.train_step(batches)
    parameters = trainer.runner.model.weights.parameters()
    large = {name for name, p in parameters.items() if p.ds_tensor.ds_numel * 4 >= 1 << 20}
    away = {name for name, p in parameters.items() if p.ds_tensor.status is PartitionedParamStatus.NOT_AVAILABLE}
    assert all(parameters[name].ds_tensor.numel() <= 1 for name in away)
    files = list(Path(project).parent.glob(f"nvme/crosstrain-*-{os.getpid()}/zero_stage_3/*params/**/*.swp"))
    assert len(files) == len(large)
    trainer.runner.close()
    return large, away


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["run.runner.offload_param.buffer_count=2"], "offload_param.buffer_count: this model needs at least"),
        (["run.runner.offload_param.buffer_size=100"], "offload_param.buffer_size: this model needs at least"),
    ],
)
@pytest.mark.skipif(not NVME, reason="needs deepspeed and libaio's headers")
@pytest.mark.slow
def test_buffers_that_are_too_few_are_refused(workspace: Workspace, options: list[str], sentence: str) -> None:
    with pytest.raises(AssertionError, match=sentence):
        follow(workspace, "zero3_nvme@2", *COMMON, *nvme(workspace.path)[:2], "model.n_embd=384", *options)


def _swapped_files(project: str, options: tuple[str, ...]) -> int:
    """Files of this rank on the device after a step."""
    trainer = make_trainer(project, options)
    trainer.train_step(trainer.batches())
    files = Path(project).parent.glob(f"nvme/crosstrain-*-{os.getpid()}/**/*.swp")
    count = len(list(files))
    trainer.runner.close()
    return count


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory: pytest.TempPathFactory, dataset: Path) -> Any:
    workspace = Workspace(tmp_path_factory.mktemp("evaluated"), dataset)
    options = (*COMMON, "run.eval_interval=3", "run.eval_iters=2", "model.dropout=0.1")
    return workspace, options, follow(workspace, "ddp@1", *options)


@pytest.mark.parametrize("other", mostly_slow(["fsdp@2", "zero2@2", "zero3@2"], []))
def test_evaluating_between_steps_disturbs_nothing(evaluated: Any, other: str) -> None:
    workspace, options, one = evaluated
    many = follow(workspace, other, *options)
    assert_equal_training(one, many, TOLERANCE)
    validation = [[row["val_loss"] for row in run.rows if "val_loss" in row] for run in (many, one)]
    assert len(validation[0]) == 7  # at every third step, and after the last one
    assert relative(*validation) < TOLERANCE


@pytest.mark.slow
def test_what_evaluation_left_gathered_is_saved_whole(evaluated: Any) -> None:
    workspace, options, one = evaluated
    runner = "run.runner={name: fsdp, reshard_after_forward: false}"
    many = follow(workspace, "fsdp@2", *options, runner, "run.save_interval=6", label="gathered")
    assert relative(many.column("loss"), one.column("loss")) < TOLERANCE
    saved = Reader.open(many.checkpoint(18))  # a step that ends in an evaluation
    assert saved.names("exp_avg") == saved.names("param")
