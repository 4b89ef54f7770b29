"""Image-text models of transformers train alike under every runner, and as a loop without the platform does."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

import crosstrain
from conftest import Run
from crosstrain import IGNORE_INDEX, Message, registry
from crosstrain.config.load import load_config
from crosstrain.data.splits import open_split, training_dataset
from crosstrain.inference.decoder import DecodeState
from fixtures_image_text import ENDS, FAMILIES, write_family
from fixtures_ranks import begin, mostly_slow, run_ranks, train

STEPS, RATE = 20, 3e-3
RUNNERS: dict[str, str] = {
    "ddp": "ddp", "fsdp": "fsdp", "zero1": "zero1", "zero2": "zero2", "zero3": "zero3",
    "tp2": "{name: megatron, tensor_parallel: 2}", "pp2": "{name: megatron, pipeline_parallel: 2}",
    "cp2": "{name: megatron, context_parallel: 2}",
}  # fmt: skip


def write_rows(folder: Path) -> None:
    """Conversations about one, no and four images; on two ranks, micro batches of one rank are text only."""
    rng, rows = np.random.default_rng(0), []
    for number in range(32):
        count = (1, 0, 4, 0)[number % 4]
        names = [f"{number}_{i}.png" for i in range(count)]
        for name in names:
            size = (*rng.integers(20, 60, 2), 3)
            Image.fromarray(rng.integers(0, 256, size, dtype=np.uint8)).save(folder / name)
        question = "<image>" * count + "what colour? "
        answer = ["red", "green", "blue"][number % 3] + " circle" * (number % 2)
        rows.append({
            "images": names,
            "messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}],
        })  # fmt: skip
    (folder / "rows.json").write_text(json.dumps(rows))


def write_project(family: str, folder: Path, **data: Any) -> Path:
    write_rows(folder)
    dialogue = {"name": "dialogue", "system": None}
    config = {
        "model": {
            "arch": "image_text", "config": write_family(family, folder / "processor"),
            "router_loss": "none",  # the library's models add none by default
        },
        "datasets": {
            "rows": {
                "name": "instructions", "annotations": str(folder / "rows.json"), "images": str(folder),
                "processor": str(folder / "processor"), "split": [1], "max_length": 256,
                "text_processor": {"train": dialogue, "eval": dialogue},
                **data,
            },
        },
        "run": {
            "output_dir": "out", "device": "cpu", "max_iters": STEPS, "global_batch_size": 8, "micro_batch_size": 2,
            "log_interval": 1, "weight_decay": 0, "init_lr": RATE, "min_lr": RATE, "warmup_steps": 0,
            "grad_norm_clip": 0,
        },
    }  # fmt: skip
    path = folder / "project.yaml"
    path.write_text(json.dumps(config))
    return path


@pytest.fixture(scope="module", params=mostly_slow(FAMILIES, ["qwen2_5_vl"]))
def alone(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Run]:
    folder = tmp_path_factory.mktemp(request.param)
    project = write_project(request.param, folder)
    return project, train(project, "alone")


@pytest.mark.parametrize("runner", mostly_slow(RUNNERS, ["cp2"]))
def test_two_ranks_train_as_one(alone: tuple[Path, Run], runner: str) -> None:
    project, one = alone
    two = train(project, runner, f"run.runner={RUNNERS[runner]}", size=2)
    assert two.column("loss") == pytest.approx(one.column("loss"), rel=2e-6)


def test_losses_are_those_of_a_bare_loop(alone: tuple[Path, Run]) -> None:
    project, run = alone
    ((initial, data),) = run_ranks(1, begin, str(project), str(project.parent / "read"), STEPS)
    model = AutoModelForImageTextToText.from_pretrained(run.checkpoint(STEPS), attn_implementation="sdpa").train()
    parameters = dict(model.named_parameters())
    for name, parameter in parameters.items():
        if name in initial:
            parameter.data.copy_(torch.from_numpy(initial[name]))
    optimizer = torch.optim.AdamW(parameters.values(), RATE, weight_decay=0)
    losses = []
    for micro_batches in data:
        total = sum(int((micro["labels"] != IGNORE_INDEX).sum()) for micro in micro_batches)
        losses.append(sum(bare_step(model, micro, total) for micro in micro_batches))
        optimizer.step()
        optimizer.zero_grad()
    assert run.column("loss") == pytest.approx(losses, rel=2e-6)


def bare_step(model: torch.nn.Module, micro: dict[str, np.ndarray], total: int) -> float:
    """Loss and gradients of a micro batch, by the library's own forward."""
    given = {key: torch.from_numpy(value) for key, value in micro.items()}
    labels, types = given.pop("labels"), given["mm_token_type_ids"]
    if model.config.model_type == "paligemma":
        targets = (labels != IGNORE_INDEX).long()
        types = (targets.cumsum(1) - targets > 0).long()  # 1 after the first target
    if model.config.model_type in ("gemma3", "paligemma"):
        given["token_type_ids"] = types
    if not model.config.model_type.startswith("qwen"):
        del given["mm_token_type_ids"]
    given.pop("position_ids", None)
    logits = model(**given, use_cache=False).logits.flatten(0, 1)
    loss = torch.nn.functional.cross_entropy(logits, labels.flatten(), reduction="sum") / total
    loss.backward()
    return loss.item()


def test_answers_are_those_of_generate_with_the_exported_folder(alone: tuple[Path, Run], tmp_path: Path) -> None:
    project, run = alone
    export = ["export", "--checkpoint", str(run.folder), "--output", str(tmp_path / "export")]
    subprocess.run([sys.executable, "-m", "crosstrain", *export], check=True, capture_output=True)
    model = AutoModelForImageTextToText.from_pretrained(tmp_path / "export", attn_implementation="sdpa").eval()
    processor, picture = AutoProcessor.from_pretrained(tmp_path / "export"), project.parent / "0_0.png"
    with crosstrain.open(run.folder) as ours, ours.runner.evaluating():
        data = training_dataset(ours.config)
        builder = registry.get("dataset", data.name).prompt_builder(data.options, run.checkpoint(STEPS))
        for files in ([], [picture], [picture] * 3):
            texts = [{"type": "text", "text": ("\n" if files else "") + "what colour?"}]
            turn = {"role": "user", "content": [{"type": "image"}] * len(files) + texts}
            prompt = processor.apply_chat_template([turn], add_generation_prompt=True)
            images = [[Image.open(file).convert("RGB") for file in files]] if files else None
            if model.config.model_type == "paligemma":  # its processor adds <s> and a line break itself
                prompt = prompt.replace("<s>", "")[:-1]
                if images is None:
                    continue
            given = processor(text=[prompt], images=images, return_tensors="pt", add_special_tokens=False)
            given.pop("labels", None)
            asked = builder.ask([Message("user", "<image>" * len(files) + "what colour?")], [*map(builder.open, files)])
            with torch.no_grad():
                wanted = model(**given).logits[:, -1]
                made = model.generate(**given, max_new_tokens=12, do_sample=False)
            theirs = made[0, given["input_ids"].shape[1] :].tolist()
            end = processor.tokenizer.convert_tokens_to_ids(ENDS.get(model.config.model_type, "<|im_end|>"))
            count = theirs.index(end) if end in theirs else len(theirs)
            answer = ours.chat("what colour?", files=files, max_new_tokens=12, temperature=0)
            assert answer == processor.tokenizer.decode(theirs[:count])
            logits = DecodeState(ours.runner, [asked]).logits()
            torch.testing.assert_close(
                logits, wanted[:, : logits.shape[1]], rtol=0, atol=2e-5 * float(wanted.abs().max())
            )


@pytest.mark.parametrize("then", mostly_slow(RUNNERS, []))
def test_a_run_continues_under_another_runner(alone: tuple[Path, Run], then: str) -> None:
    project, one = alone
    half = (f"run.max_iters={STEPS // 2}", f"run.lr_decay_iters={STEPS}")
    train(project, f"continued_{then}", *half)
    run = train(project, f"continued_{then}", f"run.runner={RUNNERS[then]}", size=2)
    assert run.column("loss") == pytest.approx(one.column("loss"), rel=2e-6)


@pytest.mark.slow
def test_packing_changes_no_loss(tmp_path: Path) -> None:
    """A step with all samples: its loss is the same whether they are packed or not."""
    project = write_project("qwen3_vl", tmp_path)
    whole = ("run.max_iters=1", "run.global_batch_size=32", "run.micro_batch_size=32")
    plain = train(project, "plain", *whole)
    rows = len(open_split(load_config(project, ["datasets.rows.packing=true"]), "train"))
    assert 1 < rows < 16
    packed = (
        "datasets.rows.packing=true",
        "run.max_iters=1",
        f"run.global_batch_size={rows}",
        "run.micro_batch_size=1",
    )
    assert train(project, "packed", *packed).column("loss") == pytest.approx(plain.column("loss"), rel=1e-6)
