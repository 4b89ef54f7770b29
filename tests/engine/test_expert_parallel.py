"""Mixtures of experts: every runner and layout trains as one process does."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from crosstrain_plugins.builtin.commands.plan.estimate import Project, fake_world
from transformers import AutoModelForCausalLM

from conftest import Workspace
from crosstrain.checkpoint.files import Reader
from crosstrain.cli.main import main
from crosstrain.config.load import load_config
from crosstrain.engine.checks import batch_plan
from crosstrain.training.preflight import dry_run
from fixtures_moe import mixture
from fixtures_ranks import make_trainer, mostly_slow, run_ranks, train
from fixtures_training import (
    COMMON,
    TOLERANCE,
    assert_equal_training,
    compare,
    evaluate,
    follow,
    project,
    relative,
    sized,
)

SETTINGS = {
    "adamw": ("run.optimizer=adamw", "run.init_lr=3e-3", "run.grad_norm_clip=0.3"),
    "sgd": ("run.optimizer={name: sgd, momentum: 0.9}", "run.init_lr=0.03", "run.grad_norm_clip=0"),
}
LAYOUTS = [
    "megatron_ep2@2", "ddp@2", "fsdp@2", "zero1@2", "zero2@2", "zero3@2", "megatron_tp2@2", "megatron_tp2_sp@2",
    "megatron_pp2@2", "megatron_tp2_ep2@4", "megatron_ep4@4", "megatron_ep2_pp2@4", "megatron_ep2_zero1@2",
    "megatron_ep2_zero1@4", "megatron_ep2_fsdp@2", "megatron_ep2_fsdp@4",
]  # fmt: skip
FAMILIES = ["qwen3_moe", "mixtral", "qwen2_moe"]  # the last has shared experts


@pytest.fixture(
    scope="module",
    params=mostly_slow([f"{family} {name}" for family in FAMILIES for name in SETTINGS], ["qwen3_moe adamw"]),
)
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, dataset: Any) -> Any:
    family, settings = request.param.split()
    workspace = project(Workspace(tmp_path_factory.mktemp(family), dataset), mixture(family))
    options = (*COMMON, *SETTINGS[settings])
    run = follow(workspace, "ddp@1", *options)
    losses = run.column("loss")
    assert losses[-1] < 0.8 * losses[0], "nothing was learned, so nothing was compared"
    return workspace, options, run


@pytest.mark.parametrize("layout", mostly_slow(LAYOUTS, ["megatron_ep2@2"]))
def test_mixtures_train_alike(reference: Any, layout: str) -> None:
    workspace, options, one = reference
    assert_equal_training(one, follow(workspace, layout, *options), TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["olmoe", "deepseek_v3", "gpt_oss"])  # other routers, biases, interleaved gates
@pytest.mark.parametrize("layout", ["megatron_ep2@2", "megatron_ep2_fsdp@4"])
def test_other_families_train_alike(family: str, layout: str, tmp_path: Path, dataset: Path) -> None:
    workspace = project(Workspace(tmp_path, dataset), mixture(family))
    options = (*COMMON, *SETTINGS["sgd"])
    assert_equal_training(follow(workspace, "ddp@1", *options), follow(workspace, layout, *options), TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "more"),
    [
        ("megatron_tp2_ep2@4", ("run.runner.sequence_parallel=true", "run.runner.data_parallel_style=fsdp")),
        ("megatron_ep2@2", ("run.gradient_checkpointing=full",)),
        ("megatron_ep2@2", ("run.gradient_checkpointing=selective",)),
        ("megatron_ep2_pp2@4", ("run.runner.pipeline_schedule=gpipe",)),
    ],
)
def test_expert_parallelism_beside_others_trains_alike(reference: Any, layout: str, more: tuple[str, ...]) -> None:
    workspace, options, one = reference
    label = f"beside_{zlib.crc32(repr(more).encode())}"
    assert_equal_training(one, follow(workspace, layout, *options, *more, label=label), TOLERANCE)


# ---- checkpoints, evaluation, export

LIFE = ("run.max_iters=12", "run.lr_decay_iters=12", "run.global_batch_size=8", "run.micro_batch_size=2",
        "run.save_interval=3", "run.keep_last=4")  # fmt: skip
ROUND = ["megatron_ep4@4", "ddp@1", "zero3@2", "megatron_tp2_ep2@4"]


@pytest.mark.slow
def test_a_run_goes_on_from_layout_to_layout(tmp_path: Path, dataset: Path) -> None:
    workspace = project(Workspace(tmp_path, dataset), mixture("qwen3_moe"))
    one = train(workspace.project, "one", *LIFE)
    for number, name in enumerate(ROUND, 1):
        runner, size = sized(name)
        run = train(workspace.project, "round", *LIFE, f"run.runner={runner}", f"run.max_iters={3 * number}", size=size)
    assert run.column("samples") == one.column("samples")
    assert relative(run.column("loss"), one.column("loss")) < TOLERANCE
    written = Reader.open(run.checkpoint(3))
    boxes = written.tensors["param", "model.layers.0.mlp.experts.down_proj"].boxes
    assert sorted(entry.box.offset[0] for entry in boxes) == [0, 2, 4, 6], "each rank writes its two experts"
    folder = tmp_path / "exported"
    assert main(["export", "--checkpoint", str(run.checkpoint(12)), "--output", str(folder)]) == 0
    theirs = AutoModelForCausalLM.from_pretrained(folder)
    prompts = torch.tensor([[1, 2, 3, 4, 5], [9, 8, 7, 6, 5]])
    with torch.no_grad():
        expected = theirs(prompts).logits[:, -1, :320]
    found: tuple[float, list[int]] | None = None
    for layout in ("ddp@1", "megatron_ep2@2", "megatron_tp2_ep2@4", "megatron_ep2_fsdp@2", "megatron_ep2_pp2@4"):
        runner, size = sized(layout)
        for loss, logits, tokens in run_ranks(size, evaluate, str(run.checkpoint(12)), (f"run.runner={runner}",)):
            assert torch.allclose(torch.tensor(logits), expected, rtol=0, atol=1e-5)  # of logits around 5
            found = found or (loss, tokens)
            assert loss == pytest.approx(found[0], rel=TOLERANCE)
            assert tokens == found[1]


# ---- traffic


def _exchanged(path: str, options: tuple[str, ...]) -> list[int]:
    """Bytes of what this rank puts into the all-to-all exchanges of its first step."""
    sizes, exchange = list[int](), dist.all_to_all_single

    def counted(output: torch.Tensor, given: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        sizes.append(given.nbytes)
        return exchange(output, given, *args, **kwargs)

    dist.all_to_all_single = counted
    trainer = make_trainer(path, options)
    trainer.fit()
    trainer.runner.close()
    return sizes


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["megatron_ep2@2", "megatron_ep4@4", "megatron_ep2_fsdp@4"])
def test_tokens_are_sent_as_planned(layout: str, tmp_path: Path, dataset: Path) -> None:
    workspace = project(Workspace(tmp_path, dataset), mixture("qwen3_moe"))
    runner, size = sized(layout)
    options = (*COMMON, f"run.runner={runner}", "run.max_iters=1")
    config = load_config(workspace.project, options)
    ready = dry_run(config, size)
    traced, plan = Project(config, ready.model, ready.sample), batch_plan(config, size)
    with fake_world(size):
        (held,) = traced.layouts(config, size, plan)
        exchanged = traced.trace_of(held, 1, "none").exchanged * plan.accumulation  # tensor parallelism has more
    real = run_ranks(size, _exchanged, str(workspace.project), options)
    ranks = config.run.runner.options.expert_parallel
    # Rows leave in other numbers than they come, but no row is lost: over all ranks they are as many as planned.
    assert exchanged * size * ranks == sum(map(sum, real)) * (ranks - 1)


@pytest.mark.parametrize("layout", ["megatron_tp2_sp@2", "megatron_tp2_pp2_sp@4", "megatron_tp2_ep2@4"])
def test_mixtures_on_split_sequences_are_planned(layout: str, workspace: Workspace) -> None:
    runner, size = sized(layout)
    options = (*COMMON, f"run.runner={runner}", "run.runner.sequence_parallel=true")
    config = load_config(project(workspace, mixture("qwen3_moe")).project, options)
    ready = dry_run(config, size)
    traced, plan = Project(config, ready.model, ready.sample), batch_plan(config, size)
    traced.check_layouts(plan, size)
    with fake_world(size):
        shared = traced.trace_of(traced.layouts(config, size, plan)[0], 1, "none")
    assert shared.exchanged > 0


# ---- mistakes


@pytest.mark.parametrize(
    ("model", "runner", "ranks", "sentence"),
    [
        (mixture("qwen3_moe"), "megatron_ep2", 3, "expert_parallel: 2 does not divide the 3 data-parallel copies"),
        (mixture("qwen3_moe", num_experts=6), "megatron_ep4", 4, "6 experts cannot be shared evenly by 4 ranks; use "
         "one of 1, 2, 3, 6"),
        ({"arch": "gpt2", "n_layer": 1, "n_embd": 32, "n_head": 2}, "megatron_ep2_fsdp", 2, "gpt2 has no experts"),
        (mixture("qwen3_moe", moe_intermediate_size=25), "megatron_tp2", 2, "cannot be cut experts-wise for 2 ranks"),
    ],
)  # fmt: skip
def test_what_cannot_be_shared_is_refused(
    model: dict[str, Any],
    runner: str,
    ranks: int,
    sentence: str,
    workspace: Workspace,
    capsys: pytest.CaptureFixture[str],
) -> None:
    project(workspace, model)
    command = ["plan", "--cfg-path", str(workspace.project), "--world-size", str(ranks), "--no-presets", "--options"]
    assert main([*command, f"run.runner={runner}", f"run.global_batch_size={2 * ranks}", "run.micro_batch_size=1"]) == 1
    assert sentence in capsys.readouterr().err


PLANTED = """
from dataclasses import dataclass
from functools import cached_property

from crosstrain import Box, Piece, registry

Megatron = registry.get("runner", "megatron")


@dataclass
class Shared(Megatron.Options):
    expert_parallel: int = 2


@registry.register_runner("wrong_group")
class WrongGroup(Megatron):
    Options = Shared

    def prepare(self, model, make_optimizer):
        super().prepare(model, make_optimizer)
        experts = self.strategies[1]
        shares, experts.group = experts.shares, self.dp  # which holds ranks with other experts
        experts.watch(shares)


@registry.register_runner("unsaved")
class Unsaved(Megatron):
    Options = Shared

    @cached_property
    def held(self):
        planted = type("Planted", (Lacking, type(super().held)), {})
        return planted(self)


class Lacking:
    def pieces(self, parameter, held, shape):
        found = super().pieces(parameter, held, shape)
        if len(shape) == 3 and self.runner.world.rank == 1:
            return [Piece(Box(p.box.offset, (p.box.shape[0] - 1, *p.box.shape[1:])), p.data[:-1]) for p in found]
        return found
"""


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory, dataset: Any) -> Workspace:
    workspace = project(Workspace(tmp_path_factory.mktemp("planted"), dataset), mixture("qwen3_moe"))
    (workspace.path / "planted.py").write_text(PLANTED)
    return workspace


@pytest.mark.slow
def test_gradients_of_experts_summed_over_the_wrong_ranks_are_named(planted: Workspace) -> None:
    done = compare(planted, "ddp@1", "wrong_group@2", options=(f"run.plugins=[{planted.path}/planted.py]",))
    assert done.returncode == 1
    assert "experts" in done.stdout
    assert "gradient" in done.stdout


@pytest.mark.slow
def test_a_checkpoint_without_one_expert_is_refused(planted: Workspace) -> None:
    options = ("run.max_iters=2", "run.save_interval=2", f"run.plugins=[{planted.path}/planted.py]")
    with pytest.raises(AssertionError, match="elements are not in any file"):
        train(planted.project, "unsaved", *options, "run.runner=unsaved", size=2)
