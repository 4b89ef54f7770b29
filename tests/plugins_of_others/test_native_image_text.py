"""A native image-text model trains as a bare loop over transformers' model does, and alike under every runner."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from tokenizers import Tokenizer, models
from transformers import AutoModelForImageTextToText, CLIPImageProcessor, LlavaProcessor, PreTrainedTokenizerFast

from crosstrain.config.load import load_config
from crosstrain.engine.build import make_model
from crosstrain.utils.errors import ConfigError
from fixtures_ranks import begin, run_ranks, train

HERE = Path(__file__).parent
SPECIAL = ["<pad>", "</s>", "<image>", "<unk>"]
STEPS, RATE = 4, 0.01


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny LLaVA, its processor, and pictures of one colour each that the answers name."""
    folder = tmp_path_factory.mktemp("image_text")
    letters = SPECIAL + [chr(number) for number in range(32, 127)]
    vocabulary = models.BPE(vocab={text: i for i, text in enumerate(letters)}, merges=[], unk_token="<unk>")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(vocabulary),
        pad_token="<pad>",
        eos_token="</s>",
        unk_token="<unk>",
        extra_special_tokens={"image_token": "<image>"},
    )
    images = CLIPImageProcessor(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28})
    LlavaProcessor(
        images, tokenizer, patch_size=14, vision_feature_select_strategy="default", num_additional_image_tokens=1
    ).save_pretrained(folder / "processor")
    rng, rows = np.random.default_rng(0), []
    for number in range(16):
        Image.fromarray(rng.integers(0, 256, (40, 40, 3), dtype=np.uint8)).save(folder / f"{number}.png")
        answer = "abcdefgh"[number % 8] * (number % 3 + 1)
        rows.append({"image": f"{number}.png", "prompt": "<image>what is it? ", "answer": answer})
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    vision = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = {
        "model": {
            "arch": "native_image_text", "make_vocab_size_divisible_by": 64,
            "config": {
                "model_type": "llava", "image_token_index": SPECIAL.index("<image>"),
                "vision_config": {"model_type": "clip_vision_model", "image_size": 28, "patch_size": 14, **vision},
                "text_config": {"model_type": "llama", "vocab_size": len(letters), **text},
            },
        },
        "datasets": {
            "rows": {
                "name": "image_text_rows", "path": str(folder / "rows.jsonl"), "seq_length": 40,
                "processor": str(folder / "processor"),
            },
        },
        "run": {
            "plugins": [str(HERE)], "output_dir": "out", "runner": "ddp", "device": "cpu", "max_iters": STEPS,
            "global_batch_size": 8, "micro_batch_size": 2, "log_interval": 1, "weight_decay": 0, "init_lr": RATE,
            "min_lr": RATE, "grad_norm_clip": 0, "freeze": ["model.vision_tower.*"],
        },
    }  # fmt: skip
    path = folder / "project.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def test_losses_are_those_of_a_bare_loop(project: Path) -> None:
    run = train(project, "alone")
    ((initial, data),) = run_ranks(1, begin, str(project), str(project.parent / "read"), STEPS)
    model = AutoModelForImageTextToText.from_pretrained(run.checkpoint(STEPS)).train()  # of transformers, as published
    parameters = dict(model.named_parameters())
    assert parameters.keys() == initial.keys()
    final = {name: p.detach().clone() for name, p in parameters.items()}
    for name, p in parameters.items():
        p.data.copy_(torch.from_numpy(initial[name]))
        p.requires_grad_("vision_tower" not in name)
    optimizer = torch.optim.AdamW([p for p in parameters.values() if p.requires_grad], RATE, weight_decay=0)
    for step, micro_batches in enumerate(data):
        total, losses = sum(int((micro["labels"] != -100).sum()) for micro in micro_batches), 0.0
        for micro in micro_batches:
            given = {key: torch.from_numpy(value) for key, value in micro.items()}
            labels = given.pop("labels").flatten()
            logits = model(**given).logits.flatten(0, 1)
            loss = torch.nn.functional.cross_entropy(logits, labels, reduction="sum") / total
            loss.backward()
            losses += loss.item()
        assert run.column("loss")[step] == pytest.approx(losses, rel=1e-6)
        optimizer.step()
        optimizer.zero_grad()
    assert run.column("loss")[-1] < run.column("loss")[0]
    for name, p in parameters.items():
        torch.testing.assert_close(final[name], p.detach(), rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize(
    "runner", ["ddp", *(pytest.param(name, marks=pytest.mark.slow) for name in ("fsdp", "{name: deepspeed, stage: 2}"))]
)
def test_two_ranks_train_as_one(project: Path, runner: str) -> None:
    alone = train(project, "one_rank")
    shared = train(project, "two_ranks", f"run.runner={runner}", size=2)
    assert shared.column("loss") == pytest.approx(alone.column("loss"), rel=1e-5)


def test_a_family_without_images_is_refused_in_a_sentence(project: Path) -> None:
    config = load_config(project, ["model.config={model_type: llama}"])
    with pytest.raises(ConfigError, match=r"model\.config: transformers has no image-text model of LlamaConfig"):
        make_model(config)
