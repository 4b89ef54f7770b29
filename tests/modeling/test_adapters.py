"""Adapters: trained alike under every runner, saved whole, opened by peft, merged by export."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from conftest import ENVIRONMENT, ROOT, Run, Workspace
from crosstrain.checkpoint.files import Reader
from crosstrain.checkpoint.folders import find_checkpoint
from crosstrain.config.load import load_config
from crosstrain.engine.build import build_model
from crosstrain.engine.runner import Runner
from crosstrain.utils.errors import UserError
from fixtures_ranks import mostly_slow, train
from fixtures_training import SETTINGS, TOLERANCE, Followed, assert_equal_training, follow, project

GPT2 = {"arch": "gpt2", "n_layer": 2, "n_embd": 32, "n_head": 2, "n_positions": 32, "vocab_size": 320}
SMALL = {
    "vocab_size": 320, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 32,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "gpt2": GPT2,
    "qwen": {"arch": "qwen", **SMALL},
    "llama": {"arch": "causal_lm", "config": {"model_type": "llama", **SMALL}},
}
# Sums over ranks are rounded in another order in each of 20 steps. Adam amplifies this where gradients are near zero,
# as those of A are at first, because B begins at zero. With `run.bitwise`, adapters train to the same bits under every
# runner (engine/test_bitwise_models.py), so these differences are rounding.
LOSSES = {"sgd": TOLERANCE, "adamw": 5e-6}
WEIGHTS = 1e-5  # absolute, as weights are of order 0.1
Case = tuple[Workspace, list[str], Followed]


def build(workspace: Workspace, *options: str, checkpoint: Path | None = None) -> Runner:
    config = load_config(workspace.project, options)
    runner = Runner(None, config.run)
    runner.setup()
    build_model(config, runner, checkpoint, for_training=False)
    return runner


def logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    model.eval()
    with torch.no_grad():
        return model(input_ids=ids, labels=None).float() if hasattr(model, "blocks") else model(ids).logits[:, -1]


IDS = torch.arange(24).view(2, 12) * 13 % 320


def pretrained(workspace: Workspace, model: str) -> Path:
    """A folder of pretrained weights, a checkpoint of full training; the project then begins with them."""
    if not (workspace.path / "base").exists():
        project(workspace, MODELS[model])
        train(workspace.project, "base", "run.max_iters=2")
    folder = workspace.path / "base" / "checkpoints" / "step_000002"
    sizes = {"dropout": 0.0} if model == "gpt2" else {}
    project(workspace, {"arch": MODELS[model]["arch"], "pretrained": str(folder), **sizes})
    return folder


def adapter_tensors(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "adapter_model.safetensors")


@pytest.mark.parametrize("model", MODELS)
def test_an_adapter_changes_nothing_at_first_and_is_all_that_trains(workspace: Workspace, model: str) -> None:
    project(workspace, MODELS[model])
    plain, adapted = build(workspace).model, build(workspace, "model.adapter={name: lora, rank: 4}").model
    assert torch.equal(logits(plain, IDS), logits(adapted, IDS))
    names = {name for name, p in adapted.weights.parameters().items() if p.requires_grad}
    assert names == {name for name in adapted.weights.parameters() if ".lora_" in name}
    assert names == adapted.weights.parameters().keys() - plain.weights.parameters().keys()
    blocks, per_block = 2, 4 if model == "gpt2" else 7
    assert len(names) == 2 * blocks * per_block


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory, dataset: Path) -> Callable[[str, str], Case]:
    """The run of one process for a model and an optimizer."""

    @lru_cache
    def make(model: str, optimizer: str) -> Case:
        workspace = Workspace(tmp_path_factory.mktemp(model), dataset)
        pretrained(workspace, model)
        options = [option for option in SETTINGS[optimizer] if "dropout" not in option]
        options += ["run.micro_batch_size=1", "model.adapter={name: lora, rank: 4, alpha: 8}"]
        return workspace, options, follow(workspace, "ddp@1", *options)

    return make


CASES = [
    (model, optimizer, runner)
    for model in MODELS
    for optimizer in ("sgd", "adamw")
    for runner in (
        "ddp@2",
        "fsdp@2",
        "zero1@2",
        "zero2@2",
        "zero3@2",
        "megatron_tp2@2",
        "megatron_pp2@2",
        "megatron_tp2_zero1@4",
    )
]


@pytest.mark.parametrize("case", mostly_slow(CASES, []), ids="-".join)
def test_every_runner_trains_and_saves_the_same_adapter(
    reference: Callable[[str, str], Case], case: tuple[str, str, str]
) -> None:
    model, optimizer, runner = case
    workspace, options, one = reference(model, optimizer)
    other = follow(workspace, runner, *options, label=f"run_{optimizer}")
    assert_equal_training(one, other, LOSSES[optimizer])
    mine, theirs = adapter_tensors(one.checkpoint(20)), adapter_tensors(other.checkpoint(20))
    assert len(mine) == 2 * 2 * (4 if model == "gpt2" else 7)
    assert max(value.abs().max() for name, value in mine.items() if "lora_B" in name) > 1e-3  # it has learned
    assert theirs.keys() == mine.keys()
    worst = max((theirs[name] - mine[name]).abs().max().item() for name in mine)
    assert worst < WEIGHTS


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["full", "selective", "offload"])
@pytest.mark.parametrize("runner", ["ddp@1", "fsdp@2"])
def test_checkpointed_blocks_train_the_same_adapter(
    reference: Callable[[str, str], Case], runner: str, mode: str
) -> None:
    """The first block's input needs no gradient, since the embeddings are frozen."""
    workspace, options, one = reference("gpt2", "sgd")
    other = follow(workspace, runner, *options, f"run.gradient_checkpointing={mode}", label=mode)
    assert_equal_training(one, other, TOLERANCE)


@pytest.fixture(scope="module")
def trained(shared_workspace: Workspace) -> Workspace:
    """A run of two ranks that trained an adapter, in the folder `tuned`."""
    pretrained(shared_workspace, "gpt2")
    options = ("run.max_iters=8", "run.init_lr=0.05", "model.adapter={name: lora, rank: 4}", "run.runner=fsdp")
    train(shared_workspace.project, "tuned", *options, size=2)
    return shared_workspace


@pytest.mark.slow
def test_peft_opens_a_checkpoint_and_export_merges_it(trained: Workspace, tmp_path: Path) -> None:
    folder = trained.path / "tuned" / "checkpoints" / "step_000008"
    plain = AutoModelForCausalLM.from_pretrained(trained.path / "base" / "checkpoints" / "step_000002")
    before = logits(plain, IDS)
    opened = PeftModel.from_pretrained(plain, folder)
    ours = build(trained, "model.adapter={name: lora, rank: 4}", checkpoint=folder).model
    assert (logits(opened, IDS) - before).abs().max() > 0.1
    assert torch.allclose(logits(opened, IDS), logits(ours, IDS), atol=1e-6)
    command = [sys.executable, "-m", "crosstrain", "export", "--checkpoint", "tuned", "--output", str(tmp_path / "hf")]
    environment = ENVIRONMENT | {"PYTHONPATH": str(ROOT / "platform")}
    subprocess.run(command, cwd=trained.path, env=environment, check=True, capture_output=True)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert torch.allclose(logits(merged, IDS), logits(opened, IDS), atol=2e-6)
    assert "lora" not in str(load_file(tmp_path / "hf" / "model.safetensors").keys())


@pytest.mark.slow
@pytest.mark.parametrize("source", ["run", "checkpoint", "peft"])
def test_an_adapter_starts_from_another(trained: Workspace, tmp_path: Path, source: str) -> None:
    folder = trained.path / "tuned" / "checkpoints" / "step_000008"
    if source == "peft":
        plain = AutoModelForCausalLM.from_pretrained(trained.path / "base" / "checkpoints" / "step_000002")
        PeftModel.from_pretrained(plain, folder).save_pretrained(tmp_path / "peft")
    path = {"run": trained.path / "tuned", "checkpoint": folder, "peft": tmp_path / "peft"}[source]
    again = build(trained, f"model.adapter={{name: lora, pretrained: {path}}}").model
    ours = build(trained, "model.adapter={name: lora, rank: 4}", checkpoint=folder).model
    assert torch.equal(logits(again, IDS), logits(ours, IDS))


@pytest.mark.parametrize(
    ("adapter", "message"),
    [
        (
            "{name: lora, targets: [q_proj]}",
            r"model\.adapter\.targets: 'q_proj' is not a linear layer of the blocks .*; they have c_attn, c_fc, c_proj",
        ),
        ("{name: lora, targets: [lm_head]}", "model.adapter.targets: 'lm_head' is not a linear layer of the blocks"),
        ("{name: lora, rank: 0}", "model.adapter.rank: expected a whole number of at least 1"),
        ("{name: lara}", "there is no adapter called 'lara'; did you mean lora"),
        ("{name: lora, rank: 8, pretrained: tuned}", "model.adapter.rank: expected 4, as in .*, got 8"),
        ("{name: lora, pretrained: base}", "expected an adapter, but there is no adapter_config.json"),
        ("{name: lora, pretrained: nowhere}", "nowhere"),
    ],
)
def test_what_does_not_fit_is_refused(
    trained: Workspace, monkeypatch: pytest.MonkeyPatch, adapter: str, message: str
) -> None:
    monkeypatch.chdir(trained.path)
    with pytest.raises(UserError, match=message):
        build(trained, f"model.adapter={adapter}")


def test_an_adapter_is_no_model_to_begin_with(trained: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(trained.path)
    base = trained.path / "base" / "checkpoints" / "step_000002"
    said = (
        f"tuned: contains an adapter without its base model; load both with model.pretrained: {base} and "
        "model.adapter: {name: lora, pretrained: tuned}"
    )
    with pytest.raises(UserError, match=re.escape(said)):
        build(trained, "model.adapter=null", "model.pretrained=tuned")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("lora_alpha", 0), ("lora_alpha", float("nan")), ("lora_alpha", "8"), ("r", 0), ("r", True),
        ("target_modules", "all-linear"), ("target_modules", [1]), ("init_lora_weights", "pissa"), ("bias", "all"),
        ("use_rslora", True), ("rank_pattern", {"c_fc": 2}), ("of_a_later_release", {"on": True}), ("peft_type", "IA3"),
    ],
)  # fmt: skip
def test_an_adapter_of_another_kind_is_refused(trained: Workspace, tmp_path: Path, key: str, value: Any) -> None:
    folder = tmp_path / "peft"
    folder.mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        shutil.copy(trained.path / "tuned" / "checkpoints" / "step_000008" / name, folder)
    settings = json.loads((folder / "adapter_config.json").read_text())
    build(trained, f"model.adapter={{name: lora, pretrained: {folder}}}")
    (folder / "adapter_config.json").write_text(json.dumps(settings | {key: value}))
    with pytest.raises(UserError, match=r"adapter_config\.json: "):
        build(trained, f"model.adapter={{name: lora, pretrained: {folder}}}")


@pytest.mark.slow
def test_a_run_resumes_and_answers_as_it_is(trained: Workspace) -> None:
    more = trained.train("tuned", "run.max_iters=10", "model.adapter={name: lora, rank: 4}")
    whole = trained.train("whole", "run.max_iters=10", "run.init_lr=0.05", "model.adapter={name: lora, rank: 4}")
    assert len(more.rows) == 10
    assert set(Reader.open(find_checkpoint(more.folder)).names("param")) == set(
        name.removeprefix("base_model.model.") for name in adapter_tensors(whole.checkpoint(10))
    )
    answer = trained.evaluate("--checkpoint", "tuned", "--generate", "ban ", "--max-new-tokens", "4")
    assert answer.code == 0, answer.err


# ---- DoRA


@pytest.mark.parametrize("runner", mostly_slow(["ddp@2", "fsdp@2", "zero2@2", "megatron_pp2@2"], []))
def test_dora_trains_alike_and_is_opened_and_merged(
    reference: Callable[[str, str], Case], runner: str, tmp_path: Path
) -> None:
    workspace, options, _ = reference("gpt2", "adamw")
    options = [*options, "model.adapter.dora=true"]
    one = follow(workspace, "ddp@1", *options, label=f"dora_{runner}")
    other = follow(workspace, runner, *options, label="dora")
    assert_equal_training(one, other, TOLERANCE)
    mine, theirs = adapter_tensors(one.checkpoint(20)), adapter_tensors(other.checkpoint(20))
    assert any(name.endswith("lora_magnitude_vector") for name in mine)
    assert max((theirs[name] - mine[name]).abs().max().item() for name in mine) < WEIGHTS
    plain = AutoModelForCausalLM.from_pretrained(workspace.path / "base" / "checkpoints" / "step_000002")
    opened = PeftModel.from_pretrained(plain, other.checkpoint(20))
    command = [sys.executable, "-m", "crosstrain", "export", "--checkpoint", str(other.folder), "--output", "hf"]
    subprocess.run(
        command, cwd=tmp_path, env=ENVIRONMENT | {"PYTHONPATH": str(ROOT / "platform")}, check=True, capture_output=True
    )
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert torch.allclose(logits(merged, IDS), logits(opened, IDS), atol=2e-6)


@pytest.mark.slow
def test_dora_is_refused_where_it_cannot_be(trained: Workspace) -> None:
    for runner, said in (("zero3", "run.runner.stage: "), ("megatron_tp2", "run.runner: ")):
        options = ("model.adapter={name: lora, dora: true}", f"run.runner={runner}")
        refused = trained.train(f"refused_{runner}", *options, nproc=2, fails=True)
        assert refused.code == 1
        assert f"error: {said}parts of the model (dora, adapters or four bits of experts) need" in refused.err


# ---- QLoRA


@pytest.fixture(scope="module")
def quantised(tmp_path_factory: pytest.TempPathFactory, dataset: Path) -> tuple[Workspace, list[str]]:
    workspace = Workspace(tmp_path_factory.mktemp("quantised"), dataset)
    pretrained(workspace, "gpt2")
    return workspace, ["run.micro_batch_size=1", "model.adapter={name: qlora, rank: 4}"]


@pytest.mark.parametrize("runner", mostly_slow(["ddp@2", "fsdp@2"], []))
def test_qlora_trains_alike_and_its_weights_are_four_bits(quantised: tuple[Workspace, list[str]], runner: str) -> None:
    workspace, options = quantised
    done = workspace.path / "run_ddp@1"
    one = Followed(Run(done)) if done.exists() else follow(workspace, "ddp@1", *options)
    other = follow(workspace, runner, *options)
    assert other.column("loss") == pytest.approx(one.column("loss"), rel=TOLERANCE)
    mine, theirs = adapter_tensors(one.checkpoint(20)), adapter_tensors(other.checkpoint(20))
    assert max((theirs[name] - mine[name]).abs().max().item() for name in mine) < WEIGHTS
    assert not any("c_fc.weight" in name for name in Reader.open(one.checkpoint(20)).names("param"))


def test_qlora_computes_with_the_weights_that_bitsandbytes_would_keep(quantised: tuple[Workspace, list[str]]) -> None:
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    workspace, options = quantised
    model, plain = build(workspace, *options).model, build(workspace).model
    held = model.weights.parameters()
    packed = sum(held[name].nbytes + found.scales.nbytes for name, found in model.weights.quantized().items())
    whole = sum(p.nbytes for name, p in plain.weights.parameters().items() if name in model.weights.quantized())
    assert packed / whole == pytest.approx(0.5 / 4 + 1 / 64)
    with torch.no_grad():
        for name in model.weights.quantized():
            weight = plain.weights.parameters()[name]
            words, state = quantize_4bit(weight.T.contiguous(), blocksize=64, quant_type="nf4")
            weight.copy_(dequantize_4bit(words, state).T)
    assert torch.allclose(logits(model, IDS), logits(plain, IDS), atol=2e-6)


@pytest.mark.slow
def test_qlora_is_refused_where_it_cannot_be(quantised: tuple[Workspace, list[str]]) -> None:
    workspace, options = quantised
    for runner in ("zero3", "megatron_tp2"):
        refused = workspace.train(f"refused_{runner}", *options, f"run.runner={runner}", nproc=2, fails=True)
        assert refused.code == 1
        assert "model.adapter: qlora quantizes weights, which" in refused.err
    with pytest.raises(UserError, match=r"model\.adapter\.dora: DoRA needs unquantized weights"):
        build(workspace, "model.adapter={name: qlora, dora: true}")
    sizes = "{arch: gpt2, n_embd: 32, n_head: 2, n_layer: 2, vocab_size: 320, n_positions: 32, pretrained: null}"
    refused = workspace.train("initial", *options, f"model={sizes}", fails=True)
    assert refused.code == 1
    assert "the model needs pretrained weights" in refused.err
