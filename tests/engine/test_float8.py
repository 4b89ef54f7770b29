"""Linear layers in float8: torchao's numbers, under every runner that takes them, with checkpoints as ever."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from conftest import Workspace
from crosstrain.config.load import load_config
from crosstrain.training.preflight import preflight
from crosstrain.utils.errors import UserError
from fixtures_moe import mixture
from fixtures_ranks import make_trainer, mostly_slow, run_ranks, train
from fixtures_training import assert_equal_training, follow, project, relative, stored

QWEN = {
    "arch": "qwen", "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 384, "max_position_embeddings": 64,
}  # fmt: skip
MODEL = f"model={QWEN}".replace("'", "")
OPTIONS = (MODEL, "run.max_iters=3", "run.micro_batch_size=2", "run.global_batch_size=8")
RUNNERS = ["ddp@2", "fsdp@2", "zero1@2", "zero2@2", "zero3@2", "megatron_pp2@2"]
FLOAT8 = "run.amp={dtype: bf16, linear: float8}"


def _train(project: str, options: tuple[str, ...], by_hand: bool) -> tuple[list[float], list[np.ndarray]]:
    """Losses and gradients; `by_hand`, torchao converts the modules of a bf16 run."""
    trainer = make_trainer(project, options)
    runner, losses, gradients = trainer.runner, list[float](), list[np.ndarray]()
    if by_hand:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        for layer in runner.model.blocks():
            convert_to_float8_training(layer, config=Float8LinearConfig(emulate=True))
        torch.set_autocast_dtype("cuda", torch.bfloat16)  # the dtype of the layers' inputs, also on a CPU
    compute, step = runner.forward_backward, runner.optimizer_step

    def forward_backward(*args: Any) -> float:
        losses.append(compute(*args))
        return losses[-1]

    def optimizer_step(apply: bool = True) -> Any:
        gradients.extend(p.grad.numpy().copy() for p in runner.model.parameters())
        assert {p.dtype for p in runner.model.parameters()} == {torch.float32}
        return step(apply)

    runner.forward_backward, runner.optimizer_step = forward_backward, optimizer_step
    trainer.fit()
    runner.close()
    return losses, gradients


@pytest.mark.slow
def test_losses_and_gradients_are_torchaos_to_the_bit(workspace: Workspace) -> None:
    runs = {}
    for name, amp in {"ours": FLOAT8, "theirs": "run.amp=bf16", "bf16": "run.amp=bf16"}.items():
        options = (*OPTIONS, amp, f"run.output_dir={workspace.path}/{name}")
        (runs[name],) = run_ranks(1, _train, str(workspace.project), options, name == "theirs")
    assert runs["ours"][0] == runs["theirs"][0] != runs["bf16"][0]
    for ours, theirs in zip(runs["ours"][1], runs["theirs"][1], strict=True):
        assert np.array_equal(ours, theirs)
    # float8 rounds at 6e-2, and what thousands of such errors leave of it in a loss is far less.
    assert relative(runs["ours"][0], runs["bf16"][0]) < 1e-2


@pytest.mark.parametrize("layout", mostly_slow(RUNNERS, []))
def test_runners_train_alike_and_checkpoints_are_as_ever(workspace: Workspace, layout: str) -> None:
    one = follow(workspace, "ddp@1", *OPTIONS, FLOAT8)
    other = follow(workspace, layout, *OPTIONS, FLOAT8)
    assert_equal_training(one, other, 1e-5)
    assert "14 of 14 linear layers in the blocks compute in float8, emulated" in (other.folder / "log.txt").read_text()
    plain = train(workspace.project, "plain", *OPTIONS, "run.amp=bf16")
    names = [{name.partition("@")[0] for name in stored(run.checkpoint(3))} for run in (other, plain)]
    assert names[0] == names[1]
    resumed = train(
        workspace.project,
        "resumed",
        *OPTIONS,
        "run.amp=bf16",
        "run.max_iters=4",
        f"run.resume_from={other.checkpoint(3)}",
    )
    assert resumed.column("step") == [4]
    assert np.isfinite(resumed.column("loss")).all()


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["megatron_tp2@2", "megatron_tp2_sp@2", "megatron_tp2_pp2@4"])
def test_tensor_parallelism_differs_by_its_rounding_in_bf16_only(workspace: Workspace, layout: str) -> None:
    difference = {}
    for amp in (FLOAT8, "run.amp=bf16"):
        one = follow(workspace, "ddp@1", *OPTIONS, amp, label=f"one_{len(difference)}")
        other = follow(workspace, layout, *OPTIONS, amp, label=f"other_{len(difference)}")
        difference[amp] = relative(other.column("loss"), one.column("loss"))
    # Partial products are rounded to bf16 before they are added. Some of these differences end in another float8 value.
    assert difference["run.amp=bf16"] < difference[FLOAT8] < 4 * difference["run.amp=bf16"]


@pytest.mark.slow
def test_expert_parallelism_trains_alike(workspace: Workspace) -> None:
    project(workspace, mixture("qwen3_moe"))
    one = follow(workspace, "ddp@1", *OPTIONS[1:], FLOAT8)
    assert_equal_training(one, follow(workspace, "megatron_ep2@2", *OPTIONS[1:], FLOAT8), 1e-5)


def _slices(style: str) -> list[np.ndarray]:
    """Output and gradients of a float8 layer of which this rank holds a slice."""
    from crosstrain_plugins.builtin.runners.megatron.float8 import float8_product
    from torchao.float8 import Float8LinearConfig
    from torchao.float8.float8_linear import Float8Linear

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    x, weight, grad = _whole()
    layer = Float8Linear.from_float(torch.nn.Linear(64, 32), Float8LinearConfig(emulate=True))
    part = 1 if style == "row" else 0
    weight = weight.chunk(2, part)[rank].clone().requires_grad_()
    x = (x.chunk(2, -1)[rank] if style == "row" else x).clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y = float8_product(layer, x, weight, dist.group.WORLD)
    y.backward(grad if style == "row" else grad.chunk(2, -1)[rank])
    dist.destroy_process_group()
    return [tensor.float().numpy() for tensor in (y.detach(), x.grad, weight.grad)]


def _whole() -> list[torch.Tensor]:
    """An input [2, 8, 64], a weight [32, 64] and an output's gradient, whose second halves are larger."""
    rng = torch.Generator().manual_seed(0)
    x, weight, grad = (torch.randn(shape, generator=rng) for shape in ((2, 8, 64), (32, 64), (2, 8, 32)))
    x[..., 32:] *= 3
    weight[16:] *= 5
    weight[:, 32:] *= 3
    grad[..., 16:] *= 7
    return [x, weight, grad.bfloat16()]


def _rounded(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Quantize and dequantize with a scale for the whole tensor."""
    scale = torch.finfo(dtype).max / values.abs().max().double()
    return (values * scale.float()).to(dtype).float() / scale.float()


@pytest.mark.slow
@pytest.mark.parametrize("style", ["column", "row"])
def test_slices_have_the_float8_values_of_the_whole_tensor(style: str) -> None:
    x, weight, grad = _whole()
    x8, w8 = _rounded(x.bfloat16().float(), torch.float8_e4m3fn), _rounded(weight, torch.float8_e4m3fn)
    g8 = _rounded(grad.float(), torch.float8_e5m2)
    expected = [x8 @ w8.T, g8 @ w8, (g8.flatten(0, 1).T @ x8.flatten(0, 1))]
    first, second = ([torch.from_numpy(each) for each in parts] for parts in run_ranks(2, _slices, style))
    if style == "row":
        found = [first[0] + second[0], torch.cat([first[1], second[1]], -1), torch.cat([first[2], second[2]], 1)]
    else:
        found = [torch.cat([first[0], second[0]], -1), first[1] + second[1], torch.cat([first[2], second[2]])]
    for ours, right in zip(found, expected, strict=True):
        # bf16 rounds at 2e-3. Scales of slices would change values by up to 6e-2.
        assert (ours.float() - right).norm() < 3e-3 * right.norm()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ((MODEL, FLOAT8, "run.runner=megatron_cp2"), "float8 needs the scales of whole sequences"),
        ((FLOAT8,), "blocks have no linear layer"),  # GPT-2's Conv1D
        ((MODEL, "run.amp={dtype: fp16, linear: float8}"), "linear: float8 needs dtype=bf16, not fp16"),
    ],
)
def test_what_cannot_be_is_refused_before_a_worker_starts(
    workspace: Workspace, options: tuple[str, ...], expected: str
) -> None:
    with pytest.raises(UserError, match=expected):
        preflight(load_config(workspace.project, [*OPTIONS[1:], *options]), 2)
