"""The deepspeed runner's own things: its options, its words in the platform's log, refused steps, other optimizers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from conftest import Workspace
from crosstrain.config.load import load_config
from crosstrain.utils.errors import ConfigError
from fixtures_ranks import make_trainer, mostly_slow, run_ranks, train
from fixtures_training import sized

# Every key of the section on ZeRO in DeepSpeed's documentation that has an effect at the stage, as people paste it.
LISTINGS: dict[int, dict[str, Any]] = {
    0: {},
    1: {"allgather_partitions": True, "allgather_bucket_size": 3e8, "overlap_comm": True, "reduce_scatter": True,
        "reduce_bucket_size": 3e8, "contiguous_gradients": True},
    2: {"allgather_partitions": True, "allgather_bucket_size": 3e8, "overlap_comm": True, "reduce_scatter": True,
        "reduce_bucket_size": 3e8, "contiguous_gradients": True,
        "offload_optimizer": {"device": "cpu", "pin_memory": True}},
    3: {"offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "cpu", "pin_memory": True}, "overlap_comm": True,
        "contiguous_gradients": True, "sub_group_size": 1e9, "reduce_bucket_size": 1e6,
        "stage3_prefetch_bucket_size": 4e6, "stage3_param_persistence_threshold": 1e4,
        "stage3_max_live_parameters": 1e9, "stage3_max_reuse_distance": 1e9,
        "stage3_gather_16bit_weights_on_model_save": True},
}  # fmt: skip
NVME = {
    "offload_optimizer": {"device": "nvme", "nvme_path": "/dev/shm", "buffer_count": 4, "fast_init": False},
    "offload_param": {
        "device": "nvme",
        "nvme_path": "/dev/shm",
        "buffer_count": 5,
        "buffer_size": 1e8,
        "max_in_cpu": 1e9,
    },
}


def configure(workspace: Workspace, stage: int, options: dict[str, Any]) -> Any:
    runner = {"name": "deepspeed", "stage": stage} | options
    return load_config(workspace.project, [f"run.runner={json.dumps(runner)}"]).run.runner.options


@pytest.mark.parametrize("stage", LISTINGS)
def test_the_documented_keys_are_accepted_and_reach_deepspeed(workspace: Workspace, stage: int) -> None:
    zero = configure(workspace, stage, LISTINGS[stage]).zero()
    assert zero["stage"] == stage
    if stage == 3:
        assert zero["stage3_prefetch_bucket_size"] == 4_000_000
        assert zero["offload_param"]["device"] == "cpu"
        assert configure(workspace, 3, NVME).zero()["offload_param"]["buffer_size"] == 100_000_000


@pytest.mark.parametrize(
    ("stage", "options", "sentence"),
    [
        (2, {"overlap_com": True}, "run.runner.overlap_com: unknown key; did you mean run.runner.overlap_comm?"),
        (2, {"overlap_comm": "yes"}, "expected true or false or null, got the text 'yes'"),
        (2, {"offload_optimizer": {"device": "gpu"}}, "offload_optimizer.device: expected one of none, cpu, nvme"),
        (2, {"offload_optimizer": {"devise": "cpu"}}, "did you mean run.runner.offload_optimizer.device?"),
        (3, {"allgather_bucket_size": 3e8}, "allgather_bucket_size: ZeRO stage 3 ignores it"),
        (2, {"stage3_max_live_parameters": 5}, "ZeRO stage 2 ignores it"),
        (2, {"offload_param": {"device": "cpu"}}, "offload_param: ZeRO stage 2 ignores it"),
        (0, {"overlap_comm": True}, "ZeRO stage 0 ignores it"),
        (2, {"offload_optimizer": {"device": "nvme", "nvme_path": "/x"}}, "offloading to nvme needs ZeRO stage 3"),
        (3, {"offload_optimizer": {"device": "nvme"}}, "needs nvme_path"),
        (3, {"stage3_prefetch_bucket_size": -4}, "expected a whole number or a number of at least 0, got -4"),
        (3, {"reduce_bucket_size": 2.5}, "DeepSpeed rejects it: Input should be a valid integer"),
        (4, {}, "run.runner.stage: expected one of 0, 1, 2, 3, got 4"),
        (2, {"gradient_clipping": 1.0}, "unknown key; DeepSpeed uses this name for run.grad_norm_clip"),
        (2, {"train_batch_size": 16}, "uses this name for run.global_batch_size"),
        (2, {"bf16": {"enabled": True}}, "use this name for run.amp: bf16"),
        (2, {"zero_optimization": {"stage": 2}}, "for run.runner: the keys of this section"),
        (2, {"dump_state": True}, "there is no counterpart here: the run's folder contains the configuration"),
        (2, {"round_robin_gradients": True}, "there is no counterpart here: checkpoints could not determine"),
        (3, {"zero_hpz_partition_size": 2}, "there is no counterpart here: its second copy"),
    ],
)  # fmt: skip
def test_what_deepspeed_would_ignore_or_refuse_is_said(
    workspace: Workspace, stage: int, options: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        configure(workspace, stage, options)
    assert sentence in str(raised.value)
    assert "project.yaml" in str(raised.value) or "--options" in str(raised.value)


ODD = '''
import torch
from dataclasses import dataclass
from crosstrain.config.registry import registry

@registry.register_optimizer("odd")
class Odd(torch.optim.Adafactor):
    """Keeps a row and a column of moments for each matrix."""
    def __init__(self, groups, lr, options):
        super().__init__(groups, lr=lr)
'''


@pytest.mark.parametrize("runner", mostly_slow(["ddp@1", "zero2@2", "zero3@2", "fsdp@2"], ["zero2@2"]))
def test_an_optimizer_with_oddly_shaped_state_is_refused(workspace: Workspace, runner: str) -> None:
    (workspace.path / "plugins").mkdir()
    (workspace.path / "plugins" / "odd.py").write_text(ODD)
    name, size = sized(runner)
    with pytest.raises(AssertionError, match=r"(Config|Checkpoint)Error: .*(optimizer|Odd)"):
        train(
            workspace.project,
            "out",
            f"run.plugins=[{workspace.path}/plugins]",
            "run.optimizer=odd",
            f"run.runner={name}",
            "run.max_iters=2",
            size=size,
        )


REFUSING = ["fsdp@2", "zero0@1", "zero1@2", "zero2@2", "zero2_offload@2", "zero3@2"]


@pytest.mark.parametrize("runner", mostly_slow(REFUSING, ["zero0@1"]))
def test_a_refused_step_changes_nothing(workspace: Workspace, runner: str) -> None:
    name, size = sized(runner)
    options = (f"run.runner={name}", f"run.output_dir={workspace.path}/{runner}", "run.micro_batch_size=2")
    norms, before, after, loss_before, loss_after = run_ranks(size, _refuse_one, str(workspace.project), options)[0]
    assert norms[0] == pytest.approx(norms[1], rel=1e-6), "the norm of a refused step is its gradients'"
    assert before == after, "weights moved"
    assert loss_before == pytest.approx(loss_after, rel=1e-6), "gradients of a refused step leaked into the next"


def _refuse_one(project: str, options: tuple[str, ...]) -> Any:
    from crosstrain.checkpoint.boxes import Shard

    trainer = make_trainer(project, options)
    runner = trainer.runner
    runner.set_learning_rate(1e-2)

    def weights() -> list[list[float]]:
        shards: list[Shard] = runner.held.shards()
        return [piece.data.flatten().tolist() for shard in shards for piece in shard.pieces]

    micro_batches = next(trainer.batches())
    targets = 2 * 4 * 31
    losses, norms, seen = [], [], [weights()]
    for apply in (False, False):
        losses.append(runner.forward_backward(micro_batches, targets))
        result = runner.optimizer_step(apply)
        assert not result.applied
        norms.append(result.grad_norm)
        seen.append(weights())
    runner.close()
    return norms, seen[0], seen[2], *losses


@pytest.fixture(scope="module")
def trained(shared_workspace: Workspace) -> tuple[Workspace, Path]:
    run = train(shared_workspace.project, "trained", "run.max_iters=12", "run.runner=zero2", size=2)
    return shared_workspace, run.folder


def evaluated(trained: tuple[Workspace, Path], runner: str) -> dict[str, Any]:
    workspace, folder = trained
    name, size = sized(runner)
    run = workspace.evaluate(
        "--checkpoint",
        str(folder),
        "--nproc-per-node",
        str(size),
        "--output",
        f"{runner}.json",
        "--splits",
        "val",
        "--generate",
        "ban",
        "--max-new-tokens",
        "8",
        "--temperature",
        "0",
        "--options",
        f"run.runner={name}",
    )
    assert run.code == 0, run.err
    return json.loads((workspace.path / f"{runner}.json").read_text())


@pytest.fixture(scope="module")
def one(trained: tuple[Workspace, Path]) -> dict[str, Any]:
    return evaluated(trained, "ddp@1")


@pytest.mark.parametrize("runner", mostly_slow(["ddp@2", "fsdp@2", "zero1@2", "zero3@1", "zero3@2"], []))
def test_evaluation_gives_the_same_perplexity_and_text(
    trained: tuple[Workspace, Path], one: dict[str, Any], runner: str
) -> None:
    result = evaluated(trained, runner)
    assert result["splits"]["val"]["perplexity"] == pytest.approx(one["splits"]["val"]["perplexity"], rel=1e-6)
    assert result["completions"] == one["completions"]
