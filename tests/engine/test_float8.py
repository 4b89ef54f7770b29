"""Linear layers in float8: torchao's numbers, under every runner that takes them, with checkpoints as ever."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from conftest import Workspace
from crosstrain.config.load import load_config
from crosstrain.training.preflight import preflight
from crosstrain.utils.errors import UserError
from fixtures_ranks import make_trainer, mostly_slow, run_ranks, train
from fixtures_training import assert_equal_training, follow, relative, stored

QWEN = {
    "arch": "qwen", "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 384, "max_position_embeddings": 64,
}  # fmt: skip
MODEL = f"model={QWEN}".replace("'", "")
OPTIONS = (MODEL, "run.max_iters=3", "run.micro_batch_size=2", "run.global_batch_size=8")
FLOAT8 = "run.amp={dtype: bf16, linear: float8}"


def _train(project: str, options: tuple[str, ...], by_hand: bool) -> tuple[list[float], list[np.ndarray]]:
    """Losses and gradients; `by_hand`, torchao converts the modules of a bf16 run."""
    trainer = make_trainer(project, options)
    runner, losses, gradients = trainer.runner, list[float](), list[np.ndarray]()
    if by_hand:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        for layer in runner.model.blocks():
            convert_to_float8_training(layer, config=Float8LinearConfig(emulate=True))
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


@pytest.mark.parametrize("layout", mostly_slow(["ddp@2", "fsdp@2"], []))
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


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ((MODEL, FLOAT8, "run.runner={name: megatron, tensor_parallel: 2}"), "megatron cannot train in float8"),
        ((MODEL, FLOAT8, "run.runner=zero2"), "deepspeed cannot train in float8; use ddp or fsdp"),
        ((FLOAT8,), "blocks have no linear layer"),  # GPT-2's Conv1D
        ((MODEL, "run.amp={dtype: fp16, linear: float8}"), "linear: float8 needs dtype=bf16, not fp16"),
    ],
)
def test_what_cannot_be_is_refused_before_a_worker_starts(
    workspace: Workspace, options: tuple[str, ...], expected: str
) -> None:
    with pytest.raises(UserError, match=expected):
        preflight(load_config(workspace.project, [*OPTIONS[1:], *options]), 2)
