"""Tiny models and data, for benchmarks that compare many runs; data is made by the fixtures of the tests."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

from common import ROOT

sys.path.insert(0, str(ROOT / "tests"))

import numpy as np
from crosstrain_plugins.builtin.datasets.indexed_dataset import TokenWriter

from crosstrain.config.load import load_config
from crosstrain.data.splits import prepare_data
from fixtures_chat import SHAPES, conversation, write_tokenizer
from fixtures_vision import EVAL
from fixtures_vision import MODEL as IMAGES

VOCABULARY = 512
_LENGTH = 64
_SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
}  # fmt: skip
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 8}
GPT2 = {
    "arch": "gpt2", "vocab_size": VOCABULARY, "n_layer": 2, "n_embd": 32, "n_head": 4, "n_positions": 256,
    "dropout": 0.1,
}  # fmt: skip
_PARTS = ("vision", "qformer", "language_model")
LORA = {"name": "lora", "rank": 4, "dropout": 0.1}


def causal_lm(family: str, **config: Any) -> dict[str, Any]:
    """Return a tiny model of a family of transformers. A value of None leaves a key out."""
    config = {"model_type": family, **_SIZES, **config}
    return {"arch": "causal_lm", "config": {key: value for key, value in config.items() if value is not None}}


MODELS: dict[str, dict[str, Any]] = {
    "gpt2": GPT2,
    "qwen2": {"arch": "qwen", **_SIZES},
    "qwen3_tied": causal_lm("qwen3", head_dim=8, tie_word_embeddings=True),
    "llama": causal_lm("llama"),
    "mistral": causal_lm("mistral", sliding_window=16, head_dim=8),
    "gpt_neox": causal_lm("gpt_neox", num_key_value_heads=None),
    "olmo2": causal_lm("olmo2"),
    "qwen3_moe": causal_lm("qwen3_moe", **_EXPERTS),
    "images": {"arch": "blip2_qwen", **{part: {**IMAGES[part], "freeze": False} for part in _PARTS}},
}


def write_data(folder: Path) -> dict[str, dict[str, Any]]:
    """Write the data once; return the `datasets` of a project file by name."""
    tokenizer, rng = folder / "tokenizer", random.Random(0)
    if not (folder / "tokens.bin").exists():
        folder.mkdir(parents=True, exist_ok=True)
        write_tokenizer(tokenizer, SHAPES["chatml"].template)
        conversations = [{"messages": conversation(rng, SHAPES["chatml"])} for _ in range(400)]
        pairs = []
        for _ in range(400):
            *prompt, chosen = conversation(rng, SHAPES["chatml"], turns=rng.randint(1, 2))
            rejected = conversation(rng, SHAPES["chatml"], turns=1)[-1]
            pairs.append({"prompt": prompt, "chosen": [chosen], "rejected": [rejected]})
        for name, rows in (("chat", conversations), ("pairs", pairs)):
            (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        with TokenWriter(folder / "tokens", np.uint16) as writer:
            tokens = np.random.default_rng(0).zipf(1.3, 400 * (_LENGTH + 1)) % VOCABULARY
            writer.add([tokens.tolist()])
    chats = {"tokenizer": str(tokenizer), "seq_length": 4 * _LENGTH, "split": [1, 0, 0]}
    questions = {"name": "vqa"}
    return {
        "text": {"name": "text", "path": f"{folder}/tokens", "seq_length": _LENGTH, "split": [1, 0, 0]},
        "chat": {"name": "chat", "path": f"{folder}/chat.jsonl", "packing": True, **chats},
        "pairs": {"name": "preference", "path": f"{folder}/pairs.jsonl", **chats},
        "shapes": {
            "name": "shapes", "path": f"{folder}/shapes", "images": 400, "held_out": 8, "image_tokens": 4,
            "vis_processor": {"train": EVAL, "eval": EVAL},
            "text_processor": {"train": questions, "eval": questions},
        },
    }  # fmt: skip


def write_project(path: Path, model: dict[str, Any], data: dict[str, Any], run: dict[str, Any]) -> Path:
    """Write a project file, and prepare its data."""
    run = {"output_dir": f"{path.parent}/out", **run}
    path.write_text(json.dumps({"model": model, "datasets": {"data": data}, "run": run}))  # JSON is YAML
    prepare_data(load_config(path))
    return path
