"""What was trained is what is saved, whatever folder the tokenizer comes from: for every model on every kind of data.

The tokenizers here are folders of whole models, as people have them on disk. Their weights and configuration are of the
same shape as what is trained, so that taking them for it would not show in any other way.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file

import fixtures_vision as sight
from conftest import write_text
from crosstrain.checkpoint.folders import find_checkpoint
from crosstrain.cli.main import main
from crosstrain.config.load import load_config
from crosstrain.config.registry import registry
from crosstrain.config.schema import Checker
from crosstrain.data.splits import prepare_data
from crosstrain.utils.assets import GENERATION_CONFIG, TOKENIZER_FILES
from fixtures_ranks import make_trainer, run_ranks

VOCABULARY = 322
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": {"arch": "gpt2", "n_layer": 1, "n_embd": 32, "n_head": 2, "n_positions": 256},
    "qwen": {
        "arch": "qwen", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 1, "max_position_embeddings": 256,
    },
    "causal_lm": {"arch": "causal_lm", "config": {
        "model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 256}},
}  # fmt: skip
LANGUAGE_DATA = ["text", "instructions", "mixture of texts", "mixture of instructions"]
SEEING_DATA = ["shapes", "image_text", "instructions", "mixture of images"]
CASES = [
    *(f"{model}{start} on {data}" for model in FAMILIES for start in ("", " pretrained") for data in LANGUAGE_DATA),
    *(f"blip2_qwen{start} on {data}" for start in ("", " pretrained", " frozen") for data in SEEING_DATA),
]  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, dataset: Path) -> Path:
    """Data of every kind, and for every family a folder of a model with the data's tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GPT2Config, LlamaConfig, Qwen2Config

    place = tmp_path_factory.mktemp("kept")
    (place / "tiny").symlink_to(dataset)
    for family, (cls, options) in {
        "gpt2": (GPT2Config, FAMILIES["gpt2"]),
        "qwen": (Qwen2Config, FAMILIES["qwen"]),
        "causal_lm": (LlamaConfig, FAMILIES["causal_lm"]["config"]),
    }.items():
        given = {key: value for key, value in options.items() if key not in ("arch", "model_type")}
        model = AutoModelForCausalLM.from_config(cls(**given, vocab_size=VOCABULARY))
        model.save_pretrained(place / family)
        GenerationConfig(eos_token_id=[7, 319], temperature=0.7, do_sample=True).save_pretrained(place / family)
        tokenizer = AutoTokenizer.from_pretrained(dataset / "tokenizer")
        tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
        tokenizer.save_pretrained(place / family)
        (place / family / "pytorch_model.bin").write_bytes(b"decoy")
        config = place / family / "config.json"
        config.write_text(json.dumps(json.loads(config.read_text())))  # to be told from one that was written anew
        (place / family / "adapter_config.json").write_text('{"base_model_name_or_path": "elsewhere"}')
    words = [json.loads(line)["text"] for line in write_text(place / "words.jsonl", 16).read_text().splitlines()]

    def turns(i: int, image: str = "") -> list[dict[str, str]]:
        return [{"from": "human", "value": image + words[i][:12]}, {"from": "gpt", "value": words[i][12:30]}]

    chats = [{"image": [], "conversations": turns(i)} for i in range(16)]
    (place / "chats.json").write_text(json.dumps(chats))
    seen = [{"image": [f"{i % 3}.png"], "conversations": turns(i, "<image>")} for i in range(16)]
    (place / "seen.json").write_text(json.dumps(seen))
    for i in range(3):
        sight.picture(place / f"{i}.png", i)
    return place


def data_of(kind: str, place: Path, tokenizer: Path) -> dict[str, Any]:
    """A dataset's part of a project file."""
    if kind.startswith("mixture of"):
        part = data_of({"texts": "text", "images": "shapes"}.get(word := kind.split()[-1], word), place, tokenizer)
        return {"name": "mixture", "parts": [{"dataset": part, "ratio": ratio} for ratio in (2.0, 1.0)]}
    if kind == "text":
        path = str(place / "tiny")
        return {"name": "text", "path": path, "seq_length": 32, "split": [9, 1, 0], "tokenizer": str(tokenizer)}
    images = {"image_tokens": 4, "vis_processor": {"train": sight.EVAL, "eval": sight.EVAL}}
    common = images | {"tokenizer": str(tokenizer)}
    if kind == "instructions":
        return common | {"name": "instructions", "annotations": str(place / "seen.json"), "images": str(place)}
    shapes = common | sight.shapes(place)
    if kind == "shapes":
        return shapes
    cls = registry.get("dataset", "shapes")
    cls.prepare(Checker(".".join).dataclass(cls.Options, {k: v for k, v in shapes.items() if k != "name"}, ()))
    read = {key: value for key, value in shapes.items() if key in {*common, "text_processor"}}
    shards = [str(place / "shapes" / f"{split}-*.tar") for split in ("train", "val")]
    return read | {"name": "image_text", "train": shards}


def model_of(name: str, start: str, place: Path) -> tuple[dict[str, Any], Path]:
    """A model's part of a project file, and the folder of a model that has its tokenizer."""
    if name != "blip2_qwen":
        if start:
            return {"arch": name, "pretrained": str(place / name)}, place / name
        options = copy.deepcopy(FAMILIES[name])
        (options.get("config") or options)["vocab_size"] = VOCABULARY
        return options, place / name
    options = copy.deepcopy(sight.MODEL)
    language: dict[str, Any] = options["language_model"]
    language["model"] = sight.LANGUAGE | {"vocab_size": VOCABULARY}
    if start:
        language["model"] = {"name": "qwen", "pretrained": str(place / "qwen")}
    if start != "frozen":
        for part in ("vision", "qformer", "language_model"):
            options[part]["freeze"] = False
    return options, place / "qwen"


def trained(project: str, options: tuple[str, ...]) -> dict[str, np.ndarray]:
    """The parameters after training, as the runner holds them. Collective."""
    from torch.distributed.tensor import DTensor

    trainer = make_trainer(project, options)
    trainer.fit()
    found = {}
    for name, parameter in trainer.runner.model.weights.parameters().items():
        shape = trainer.runner.model.weights.logical_shape(name, trainer.runner.held.full_shape(parameter))
        whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        found[name] = whole.detach()[tuple(slice(n) for n in shape)].clone().numpy()
    trainer.runner.close()
    return found


def check(found: Mapping[str, torch.Tensor], truth: dict[str, np.ndarray]) -> None:
    """Every trained tensor is there, to the bit; padding aside."""
    for name, value in truth.items():
        there = found[name].detach().numpy()[tuple(slice(n) for n in value.shape)]
        assert there.dtype == value.dtype
        assert np.array_equal(there, value), name


@pytest.mark.slow
@pytest.mark.parametrize(("case", "runner"), list(product(CASES, ["ddp", "fsdp"])))
def test_what_was_trained_is_what_is_opened(place: Path, tmp_path: Path, case: str, runner: str) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    (name, start), data = case.split(" on ")[0].partition(" ")[::2], case.split(" on ")[1]
    model, folder = model_of(name, start, place)
    dataset = data_of(data, place, folder)
    if name != "blip2_qwen" and data.endswith("instructions"):
        dataset = json.loads(json.dumps(dataset).replace("seen.json", "chats.json"))
    run = {
        "runner": runner, "output_dir": str(tmp_path / "out"), "max_iters": 2, "global_batch_size": 4,
        "micro_batch_size": 2, "init_lr": 1e-2, "log_interval": 1, "device": "cpu",
    }  # fmt: skip
    project = tmp_path / "project.yaml"
    project.write_text(yaml.safe_dump({"model": model, "datasets": {"data": dataset}, "run": run}))
    prepare_data(load_config(project, []))
    truth = run_ranks(2 if runner == "fsdp" else 1, trained, str(project), ())[0]

    checkpoint = find_checkpoint(tmp_path / "out")
    assert json.loads((checkpoint / "state.json").read_text())["step"] == 2
    opened = sight.build(project, "run.runner=ddp", checkpoint=checkpoint)
    check(opened.model.weights.parameters(), truth)
    assert main(["export", "--checkpoint", str(tmp_path / "out"), "--output", str(tmp_path / "export")]) == 0
    exported = load_file(tmp_path / "export" / "model.safetensors")
    merges = opened.model.export.merges()
    merged = {*merges, *(other for merge in merges.values() for other in merge.others)}
    check(exported, {key: value for key, value in truth.items() if key not in merged})

    theirs, ours = ({path.name: path.read_bytes() for path in where.iterdir()} for where in (folder, checkpoint))
    copied = {name for name, content in theirs.items() if ours.get(name) == content} - TOKENIZER_FILES
    assert copied == ({GENERATION_CONFIG} if start and name != "blip2_qwen" else set())
    ids = AutoTokenizer.from_pretrained(checkpoint)("ban der").input_ids
    assert ids == AutoTokenizer.from_pretrained(folder)("ban der").input_ids
    if name == "blip2_qwen":
        for place_of_both in (checkpoint, tmp_path / "export"):
            with pytest.raises((OSError, ValueError)):
                AutoModelForCausalLM.from_pretrained(place_of_both)
        return
    opens = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    check(opens.state_dict(), truth)
    assert not start or opens.generation_config.eos_token_id == [7, 319]
    if runner == "ddp":
        check(AutoModelForCausalLM.from_pretrained(checkpoint).state_dict(), truth)
    else:
        with pytest.raises(OSError, match="no file named"):
            AutoModelForCausalLM.from_pretrained(checkpoint)
