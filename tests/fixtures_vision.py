"""A tiny vision-language model and tiny data, for the tests of both."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from crosstrain_plugins.builtin.datasets.vision.conversations import IMAGE_ID
from PIL import Image

from crosstrain.config.load import load_config
from crosstrain.engine.build import build_model
from crosstrain.engine.runner import Runner
from crosstrain.utils.types import IGNORE_INDEX, Sample

EVAL = {"name": "image_eval", "image_size": 16}
LANGUAGE: dict[str, Any] = {
    "name": "qwen", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "tie_word_embeddings": True,
    "initializer_range": 0.05,
}  # fmt: skip
MODEL: dict[str, Any] = {
    "arch": "blip2_qwen",
    "vision": {
        "encoder": "eva_giant_patch14_224", "image_size": 16, "patch_size": 8, "embed_dim": 32, "depth": 2,
        "num_heads": 2, "mlp_ratio": 2.0,
    },
    "qformer": {
        "num_query_tokens": 4, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
        "intermediate_size": 64, "query_std": 1.0,
    },
    "language_model": {"model": LANGUAGE},
}  # fmt: skip
OPEN = {f"model.{part}.freeze": False for part in ("vision", "qformer", "language_model")}


def options(given: dict[str, Any]) -> list[str]:
    """As --options writes them."""
    return [f"{key}={json.dumps(value)}" for key, value in given.items()]


def write_project(path: Path, dataset: dict[str, Any], **run: Any) -> Path:
    """A project file for the tiny model, with `dataset` for its data."""
    common = {"image_tokens": 4, "vis_processor": {"train": EVAL, "eval": EVAL}}
    settings = {
        "output_dir": str(path.parent / "out"), "max_iters": 8, "global_batch_size": 4, "micro_batch_size": 2,
        "init_lr": 3e-3, "log_interval": 1, "device": "cpu",
    }  # fmt: skip
    config = {"model": MODEL, "datasets": {"images": common | dataset}, "run": settings | run}
    path.write_text(yaml.safe_dump(config))
    return path


def shapes(folder: Path, **more: Any) -> dict[str, Any]:
    """A few rendered images with questions."""
    processor = {"name": "vqa"}
    small = {"images": 40, "held_out": 8, "text_processor": {"train": processor, "eval": processor}}
    return {"name": "shapes", "path": str(folder / "shapes")} | small | more


def build(project: Path, *given: str, checkpoint: Path | None = None, training: bool = False) -> Runner:
    """A single-process runner that holds the project's model."""
    config = load_config(project, list(given))
    runner = Runner(None, config.run)
    runner.setup()
    build_model(config, runner, checkpoint, for_training=training)
    runner.model.train(training)
    return runner


def picture(path: Path, seed: int, size: tuple[int, int] = (20, 24)) -> Path:
    """An image of noise."""
    pixels = np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)
    return path


def mixed_project(folder: Path, tokenizer: Path, **run: Any) -> Path:
    """A project of micro batches of one, whose samples have no image, one, or three, so some ranks have text alone."""
    entries = []
    for i in range(12):
        names = [f"{k}.png" for k in range((0, 1, 3)[i % 3])]
        question = "<image>" * len(names) + "what colour is it"
        turns = [{"from": "human", "value": question}, {"from": "gpt", "value": ("red", "blue", "green")[i % 3]}]
        entries.append({"image": names, "conversations": turns})
    for k in range(3):
        picture(folder / f"{k}.png", k)
    (folder / "notes.json").write_text(json.dumps(entries))
    dataset = {
        "name": "instructions", "annotations": str(folder / "notes.json"), "images": str(folder),
        "tokenizer": str(tokenizer),
    }  # fmt: skip
    return write_project(folder / "project.yaml", dataset, micro_batch_size=1, global_batch_size=2, **run)


def sample(images: int, length: int, seed: int) -> Sample:
    """A sample of random words and images, the last half of it to be learned."""
    rng = np.random.default_rng(seed)
    words = rng.integers(0, 60, length)
    ids = np.concatenate([*(np.append(np.full(4, IMAGE_ID), 7) for _ in range(images)), words])
    labels = np.append(ids[1:], 5)
    labels[: len(labels) - length // 2] = IGNORE_INDEX
    pixels = rng.normal(size=(images, 3, 16, 16)).astype(np.float32)
    return {"input_ids": ids, "labels": labels} | ({"pixel_values": pixels} if images else {})
