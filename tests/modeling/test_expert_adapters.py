"""Adapters and four-bit weights of experts in stacked parameters: right values, the same under every runner, merged."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from conftest import Workspace
from crosstrain.cli.main import main
from crosstrain.config.load import load_config
from crosstrain.engine.build import build_model
from crosstrain.engine.runner import Runner
from crosstrain.utils.errors import UserError
from fixtures_families import tiny
from fixtures_moe import mixture
from fixtures_ranks import train
from fixtures_training import SETTINGS, TOLERANCE, assert_equal_training, follow, project

IDS = torch.arange(24).view(2, 12) * 13 % 320
STACKS = "targets: [q_proj, experts.gate_up_proj, experts.down_proj]"
LORA = f"model.adapter={{name: lora, rank: 4, alpha: 8, {STACKS}}}"
QLORA = f"model.adapter={{name: qlora, rank: 4, {STACKS}}}"
BASE = "base/checkpoints/step_000002"
# matrices [E, out, in]; matrices [E, in, out] and biases
FAMILIES = ["qwen3_moe", pytest.param("gpt_oss", marks=pytest.mark.slow)]


@pytest.fixture(scope="module")
def based(tmp_path_factory: pytest.TempPathFactory, dataset: Path) -> Callable[[str], Workspace]:
    """Make projects that start from the weights of a tiny mixture of experts, trained for two steps."""

    @lru_cache
    def make(family: str) -> Workspace:
        workspace = Workspace(tmp_path_factory.mktemp(family), dataset)
        project(workspace, mixture(family))
        train(workspace.project, "base", "run.max_iters=2")
        return project(workspace, {"arch": "causal_lm", "pretrained": str(workspace.path / BASE)})

    return make


def build(workspace: Workspace, *options: str, checkpoint: Path | None = None) -> Any:
    config = load_config(workspace.project, options)
    runner = Runner(None, config.run)
    runner.setup()
    build_model(config, runner, checkpoint, for_training=False)
    return runner.model


def logits(model: Any) -> torch.Tensor:
    model.eval()
    with torch.no_grad():
        return model(input_ids=IDS, labels=None).float() if hasattr(model, "blocks") else model(IDS).logits[:, -1]


def randomize(model: Any) -> None:
    """Give every B values that are not zero."""
    rng = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if ".lora_B." in name:
                p.copy_(torch.randn(p.shape, generator=rng) * 0.05)


def merged_by_hand(model: Any, plain: Any, rank: int, scale: float) -> None:
    """Add each expert's B A to the weights of `plain`, expert by expert, with peft's layout of A and B."""
    adapters = model.weights.parameters()
    with torch.no_grad():
        for name, weight in plain.weights.parameters().items():
            path, _, last = name.rpartition(".")
            if last not in ("gate_up_proj", "down_proj") or "experts" not in path:
                continue
            own = path + (".base_layer" if last == "gate_up_proj" else "")  # the last wrapper is the outermost
            a, b = adapters[f"{own}.lora_A.weight"], adapters[f"{own}.lora_B.weight"]
            for e in range(count := len(weight)):
                change = scale * b[:, e::count] @ a[e * rank : (e + 1) * rank]
                weight[e] += change.T if plain.config.model_type == "gpt_oss" else change


@pytest.mark.parametrize("family", FAMILIES)
def test_each_expert_has_an_adapter_of_its_own(based: Callable[[str], Workspace], family: str) -> None:
    workspace = based(family)
    layers = "model.adapter={name: lora, rank: 4, alpha: 8, targets: [experts.gate_up_proj, experts.down_proj]}"
    plain, adapted = build(workspace), build(workspace, layers)
    assert torch.equal(logits(plain), logits(adapted))  # B begins at zero
    randomize(adapted)
    merged_by_hand(adapted, plain, rank=4, scale=2.0)
    assert torch.allclose(logits(adapted), logits(plain), atol=1e-6)
    assert (logits(adapted) - logits(build(workspace))).abs().max() > 1e-3


# Routed, shared and dense layers of these families have matrices with equal names.
@pytest.mark.parametrize("family", ["deepseek_v3", pytest.param("qwen2_moe", marks=pytest.mark.slow)])
@pytest.mark.parametrize("targets", ["null", pytest.param("[down_proj]", marks=pytest.mark.slow)])
def test_linear_layers_are_not_taken_for_experts(
    based: Callable[[str], Workspace], tmp_path: Path, family: str, targets: str
) -> None:
    workspace = based(family)
    adapter = f"model.adapter={{name: lora, rank: 4, targets: {targets}}}"
    plain, adapted = build(workspace), build(workspace, adapter)
    layers = {
        plain.weights.canonical_name(name)
        for name, module in plain.named_modules()
        if isinstance(module, torch.nn.Linear) and ".layers." in name
        if targets == "null" or name.endswith(".down_proj")
    }
    adapters = {name for name in adapted.weights.parameters() if ".lora_" in name}
    assert {name.partition(".lora_")[0] for name in adapters} == layers
    assert all(p.shape[0] == 4 for name, p in adapted.weights.parameters().items() if ".lora_A." in name)
    randomize(adapted)
    merged = build(workspace)
    with torch.no_grad():
        for name, merge in adapted.export.merges().items():
            held = adapted.weights.parameters()
            merged.weights.parameters()[name].copy_(merge.combine(held[name], *(held[other] for other in merge.others)))
    assert torch.allclose(logits(merged), logits(adapted), atol=2e-6)
    assert (logits(merged) - logits(plain)).abs().max() > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_peft_opens_the_checkpoint_and_export_merges_it(
    based: Callable[[str], Workspace], tmp_path: Path, family: str
) -> None:
    workspace = based(family)
    folder = workspace.path / BASE
    train(workspace.project, "tuned", LORA, "run.max_iters=4", "run.init_lr=0.05")
    checkpoint = workspace.path / "tuned" / "checkpoints" / "step_000004"
    ours = build(workspace, LORA, checkpoint=checkpoint)
    assert (logits(ours) - logits(build(workspace))).abs().max() > 1e-2  # it has learned
    opened = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), checkpoint)
    assert torch.allclose(logits(opened), logits(ours), atol=2e-6)
    assert main(["export", "--checkpoint", str(checkpoint), "--output", str(tmp_path / "hf")]) == 0
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert torch.allclose(logits(merged), logits(ours), atol=2e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_qlora_keeps_experts_in_four_bits(based: Callable[[str], Workspace], family: str) -> None:
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    workspace = based(family)
    model, plain = build(workspace, QLORA), build(workspace)
    quantized = model.weights.quantized()
    stacks = [name for name in quantized if "experts" in name]
    assert len(stacks) == 2 * 2  # layers, stacks
    held = {name: p for name, p in model.weights.parameters().items() if ".lora_" not in name}
    words = sum(held[name].nbytes + quantized[name].scales.nbytes for name in stacks)
    whole = sum(plain.weights.parameters()[name].nbytes for name in stacks)
    assert words / whole == pytest.approx(0.5 / 4 + 1 / 64)
    with torch.no_grad():
        for name, found in quantized.items():
            weight = plain.weights.parameters()[name]
            assert weight.shape == found.shape
            words, state = quantize_4bit(weight.contiguous(), blocksize=64, quant_type="nf4")
            weight.copy_(dequantize_4bit(words, state))
    assert torch.allclose(logits(model), logits(plain), atol=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("adapter", "runner"),
    [
        (LORA, "ddp@2"),
        (LORA, "fsdp@2"),
        (LORA, "zero2@2"),
        (LORA, "megatron_pp2@2"),
        (QLORA, "ddp@2"),
        (QLORA, "fsdp@2"),
    ],
)
def test_every_runner_trains_the_same_adapters(based: Callable[[str], Workspace], adapter: str, runner: str) -> None:
    workspace = based("qwen3_moe")
    options = [option for option in SETTINGS["sgd"] if "dropout" not in option]
    options += ["run.micro_batch_size=1", adapter]
    name = f"{adapter[21:25]}_{runner}"
    one = follow(workspace, "ddp@1", *options, label=f"one_{name}")
    assert_equal_training(one, follow(workspace, runner, *options, label=name), TOLERANCE)


@pytest.mark.slow
def test_checkpointed_blocks_compute_the_same(based: Callable[[str], Workspace]) -> None:
    workspace = based("qwen3_moe")
    options = ["run.micro_batch_size=1", LORA]
    one = follow(workspace, "ddp@1", *options, label="plain")
    again = follow(workspace, "ddp@1", *options, "run.gradient_checkpointing=full", label="checkpointed")
    assert again.column("loss") == one.column("loss")


@pytest.mark.slow
@pytest.mark.parametrize("runner", ["zero3", "megatron_tp2", "megatron_ep2"])
def test_runners_that_split_experts_are_refused(based: Callable[[str], Workspace], runner: str) -> None:
    refused = based("qwen3_moe").train(f"no_{runner}", LORA, f"run.runner={runner}", nproc=2, fails=True)
    assert refused.code == 1
    assert "parts of the model (dora, adapters or four bits of experts) need whole weights" in refused.err


@pytest.mark.slow
def test_a_plan_has_the_bytes_of_the_run(based: Callable[[str], Workspace]) -> None:
    workspace = based("qwen3_moe")
    out = workspace.path / "plan.json"
    for adapter in (LORA, QLORA):
        assert main(["plan", "--cfg-path", str(workspace.project), "--output", str(out), "--options", adapter]) == 0
        planned = json.loads(out.read_text())["memory"]["device"]["parameters"]
        model = build(workspace, adapter)
        assert planned == sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ((LORA.replace("rank", "dropout: 0.1, rank"),), "adapters of experts support neither dora nor dropout"),
        ((LORA.replace("rank", "dora: true, rank"),), "adapters of experts support neither dora nor dropout"),
        (
            (LORA.replace("down_proj", "up_proj"),),
            "'experts.up_proj' is not a linear layer of the blocks or a stack of experts",
        ),
    ],
)
def test_what_does_not_fit_is_refused(based: Callable[[str], Workspace], options: tuple[str, ...], said: str) -> None:
    workspace = based("qwen3_moe")
    with pytest.raises(UserError, match=said):
        build(workspace, *options)


def test_qlora_refuses_stacks_that_would_stay_in_full_precision(workspace: Workspace) -> None:
    model = {"arch": "causal_lm", "config": tiny("llama4_text"), "adapter": {"name": "qlora", "rank": 4}}
    said = r"^model\.adapter: qlora cannot store Llama4TextExperts in four bits; use lora$"
    with pytest.raises(UserError, match=said):
        build(project(workspace, model))


@pytest.mark.slow
def test_operations_per_token_are_those_of_the_experts_that_a_token_uses(
    based: Callable[[str], Workspace],
) -> None:
    """Frozen weights need two products per token, adapters three."""
    workspace = based("qwen3_moe")
    plain, adapted = build(workspace), build(workspace, LORA)
    share = plain.text_config.num_experts_per_tok / plain.text_config.num_experts
    assert 0 < share < 1
    frozen = {n: p.numel() for n, p in plain.named_parameters() if ".layers." in n and p.ndim > 1}
    experts = sum(size for name, size in frozen.items() if ".experts." in name)
    adapters = {n: p.numel() for n, p in adapted.named_parameters() if p.requires_grad}
    of_experts = sum(size for name, size in adapters.items() if ".experts." in name)
    rest = sum(frozen.values()) - experts + plain.lm.lm_head.weight.numel()
    routers = sum(size for name, size in frozen.items() if name.endswith(".gate.weight"))
    saved = 2 * (rest - routers + experts * share)
    added = 6 * (sum(adapters.values()) - of_experts * (1 - share))
    found = adapted.structure.flops_per_token(16)
    assert found == plain.structure.flops_per_token(16) - saved + added
