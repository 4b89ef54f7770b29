"""FSDP gathers linear layers in bf16 where autocast computes in it: half of the bytes, the same numbers."""

from __future__ import annotations

from typing import Any

import pytest
from crosstrain_plugins.builtin.commands.plan.estimate import Project

from conftest import Workspace
from crosstrain.config.load import load_config
from crosstrain.training.preflight import dry_run
from crosstrain.utils.errors import ConfigError
from fixtures_ranks import make_trainer, mostly_slow, run_ranks

QWEN = {
    "arch": "qwen", "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 384, "max_position_embeddings": 64,
}  # fmt: skip
MODELS = {"gpt2": ["model.dropout=0", "model.vocab_size=384"], "qwen": [f"model={QWEN}".replace("'", "")]}
OPTIONS = ["run.amp=bf16", "run.max_iters=5", "run.micro_batch_size=2", "run.global_batch_size=8"]


def _train(project: str, options: tuple[str, ...]) -> tuple[list[float], dict[str, int]]:
    """Losses, and bytes sent between the ranks in the second step by type."""
    from fixtures_calls import Recorder

    trainer = make_trainer(project, options)
    compute, losses, recorder = trainer.runner.forward_backward, list[float](), Recorder()

    def forward_backward(*args: Any) -> float:
        if len(losses) == 1:
            with recorder:
                losses.append(compute(*args))
        else:
            losses.append(compute(*args))
        return losses[-1]

    trainer.runner.forward_backward = forward_backward
    trainer.fit()
    trainer.runner.close()
    sent: dict[str, int] = {}
    for call in recorder.calls:
        if call.kind != "all_reduce":  # the loss's
            key = f"{call.kind} {call.dtype}"
            sent[key] = sent.get(key, 0) + call.sent
    return losses, sent


@pytest.mark.parametrize("model", mostly_slow(MODELS, []))
def test_half_of_a_blocks_bytes_are_gathered_and_losses_stay(workspace: Workspace, model: str) -> None:
    found = {}
    for name, runner in {"half": "fsdp", "whole": "{name: fsdp, param_dtype: fp32}"}.items():
        options = [*OPTIONS, *MODELS[model], f"run.runner={runner}"]
        folder = f"run.output_dir={workspace.path}/{name}"
        losses, sent = run_ranks(2, _train, str(workspace.project), (*options, folder))[0]
        config = load_config(workspace.project, options)
        plan = dry_run(config, 2)
        assert Project(config, plan.model, plan.sample).estimate(config, 2).sent == sum(sent.values())
        found[name] = losses, sent
    (half, sent), (whole, before) = found["half"], found["whole"]
    assert half[0] == whole[0]
    # Nothing is rounded that autocast does not round; a backward may take another kernel for another type.
    assert half == pytest.approx(whole, rel=1e-4)
    assert sent["reduce_scatter float32"] == before["reduce_scatter float32"]
    assert 2 * sent["all_gather bfloat16"] == before["all_gather float32"] - sent["all_gather float32"]
    assert sum(sent.values()) < 0.75 * sum(before.values())


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["full", "selective", "offload"])
def test_checkpointing_changes_no_loss(workspace: Workspace, mode: str) -> None:
    options, project, folder = (*OPTIONS, *MODELS["gpt2"], "run.runner=fsdp"), str(workspace.project), workspace.path
    plain, recomputed = (
        run_ranks(2, _train, project, (*options, f"run.gradient_checkpointing={how}", f"run.output_dir={folder}/{how}"))
        for how in ("none", mode)
    )
    assert recomputed[0][0] == pytest.approx(plain[0][0], rel=1e-4)  # as above


def test_sums_in_bf16_need_gathers_in_bf16(workspace: Workspace) -> None:
    with pytest.raises(ConfigError, match=r"run\.runner\.reduce_dtype: bf16 needs param_dtype=amp and run.amp=bf16"):
        dry_run(load_config(workspace.project, ["run.runner={name: fsdp, reduce_dtype: bf16}"]), 2)
