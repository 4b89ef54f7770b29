"""Compare training an image-text model of transformers with a loop without the platform, and packing with padding.

    python benchmarks/image_text.py [--rounds 5] [--steps 8]

A small Qwen2.5-VL with random weights takes the same batches in both loops: rows with one, no and two images, fp32. The
loop without the platform calls transformers' model, and torch's loss, clipping and fused AdamW. Packing is measured
with samples whose answers have 8 to 600 tokens, from a log-normal distribution with a median of 60; each round
processes all samples once, with the same model.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import ROOT, ratio, rounds, table

sys.path.insert(0, str(ROOT / "tests"))

import numpy as np
import torch
from crosstrain_plugins.builtin.datasets.packing import pack
from crosstrain_plugins.builtin.datasets.vision.processor_encoder import ProcessorEncoder, joined
from PIL import Image
from transformers import AutoConfig, AutoModelForImageTextToText

from crosstrain import IGNORE_INDEX, Message, Sample
from crosstrain.config.load import load_config
from crosstrain.engine.build import build_model, make_runner
from crosstrain.engine.runner import Runner
from crosstrain.utils.types import MicroBatch
from fixtures_image_text import write_family

SIZES = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4}
VISION = {
    "depth": 4,
    "hidden_size": 128,
    "intermediate_size": 352,
    "out_hidden_size": 256,
    "fullatt_block_indexes": [3],
}
ROWS, LONGEST, CAPACITY, RATE = 4, 600, 1024, 1e-4


def samples(encoder: ProcessorEncoder, lengths: list[int], seed: int) -> list[Sample]:
    """Make samples whose answers have about these lengths, with one, no and two images in turn."""
    rng, made = np.random.default_rng(seed), []
    for number, length in enumerate(lengths):
        count = (1, 0, 2)[number % 3]
        images = [Image.fromarray(rng.integers(0, 256, (32, 32, 3), dtype=np.uint8)) for _ in range(count)]
        answer = " ".join(rng.choice(["red", "green", "blue"]) for _ in range(length))
        conversation = [Message("user", "<image>" * count + "what colour?"), Message("assistant", answer)]
        made.append(encoder.sample([conversation], encoder.process(images)))
    return made


def prepared(folder: Path) -> tuple[Runner, Any, ProcessorEncoder]:
    """Return the platform's model under ddp on one rank, transformers' model with the same weights, and the encoder."""
    config = write_family("qwen2_5_vl", folder / "processor")
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [8, 12, 12]}
    config["text_config"] |= SIZES | {"rope_parameters": rope}
    config["vision_config"] |= VISION
    project = folder / "project.yaml"
    model = {"arch": "image_text", "config": config, "make_vocab_size_divisible_by": 1}
    run = {
        "runner": "ddp",
        "device": "cpu",
        "max_iters": 10,
        "grad_norm_clip": 1.0,
        "init_lr": RATE,
        "warmup_steps": 0,
        "global_batch_size": 4,
    }
    project.write_text(
        json.dumps(
            {
                "model": model,
                "datasets": {"unused": {"name": "text", "path": "none", "seq_length": 8}},
                "run": run | {"output_dir": str(folder / "out")},
            }
        )
    )
    platform = load_config(project)
    runner = make_runner(platform)
    runner.setup()
    build_model(platform, runner, None, for_training=True)
    bare = AutoModelForImageTextToText.from_config(AutoConfig.for_model(**config), attn_implementation="sdpa").train()
    bare.load_state_dict(runner.model.lm.state_dict())  # type: ignore[operator, union-attr]
    return runner, bare, ProcessorEncoder(str(folder / "processor"), None, "chat")


def platform_steps(runner: Runner, batches: list[dict[str, Any]]) -> float:
    runner.set_learning_rate(RATE)
    seconds = []
    for number, batch in enumerate(batches):
        started = time.perf_counter()
        targets = runner.model.num_targets(batch)
        runner.forward_backward([MicroBatch(number, batch, targets)], targets)
        runner.optimizer_step()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def bare_steps(model: Any, optimizer: Any, batches: list[dict[str, Any]]) -> float:
    seconds = []
    for batch in batches:
        started = time.perf_counter()
        given = {key: value for key, value in batch.items() if key != "labels"}
        labels = batch["labels"].flatten()
        logits = model(**given, use_cache=False).logits.flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(logits, labels, ignore_index=IGNORE_INDEX)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss.item()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def all_samples(runner: Runner, batches: list[dict[str, Any]]) -> float:
    """Return the seconds of steps over all batches."""
    started = time.perf_counter()
    platform_steps(runner, batches)
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--quick", action="store_true", help="see that it works; figures of no worth")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.rounds, arguments.steps = 1, 1
    with tempfile.TemporaryDirectory() as name:
        runner, bare, encoder = prepared(Path(name))
        optimizer = torch.optim.AdamW(bare.parameters(), RATE, weight_decay=0, fused=True)
        plain = samples(encoder, [100] * (ROWS * arguments.steps), 0)
        equal = [encoder.collate(plain[n : n + ROWS]) for n in range(0, len(plain), ROWS)]
        drawn = np.random.default_rng(1).lognormal(np.log(60), 0.9, 96 if not arguments.quick else 6)
        lengths = drawn.clip(8, LONGEST).astype(int).tolist()
        mixed = samples(encoder, lengths, 2)
        padded = [encoder.collate(mixed[n : n + ROWS]) for n in range(0, len(mixed), ROWS)]
        rows = pack([len(sample["input_ids"]) for sample in mixed], CAPACITY)
        packed = [encoder.collate([joined([mixed[n] for n in row])]) for row in rows]
        measured: dict[str, Any] = {
            "bare": lambda: bare_steps(bare, optimizer, equal), "platform": lambda: platform_steps(runner, equal),
            "padded": lambda: all_samples(runner, padded), "packed": lambda: all_samples(runner, packed),
        }  # fmt: skip
        found = rounds(list(measured), lambda key: {"seconds": measured[key]()}, arguments.rounds)
    shown = [
        ["step time, platform / bare loop", ratio(found["platform"], found["bare"], "seconds")],
        ["time of all samples, padded / packed", ratio(found["padded"], found["packed"], "seconds")],
    ]
    print(table(["ratio", "median (range)"], shown))


if __name__ == "__main__":
    main()
