"""Compare images from shards with a plain DataLoader over files, and a vision-language step with a bare loop.

    python benchmarks/vision.py [--rounds 5] [--images 400] [--steps 6] [--quick]

Images: timm's evaluation transform converts JPEGs of 256 x 256 pixels to 224 x 224, in one process with one thread. The
platform reads them from a WebDataset shard in its own order. The other side loads the same files with a shuffled torch
DataLoader, and makes the same tokens. Steps: the model and one batch of projects/blip2_qwen_shapes.yaml, in bf16. The
platform's runner, and a loop of forward, backward, clipping and AdamW, train the same modules in one process, in turn.
Tokens are all positions of the batch that the language model gets, including image embeddings.
"""

from __future__ import annotations

import argparse
import io
import os
import statistics
import sys
import tarfile
import tempfile
import time
from pathlib import Path
from typing import Any

from common import ROOT, ratio, rounds

sys.path.insert(0, str(ROOT / "platform"))
os.environ["HF_HUB_OFFLINE"] = "1"

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader

from crosstrain.config.batch import BatchPlan
from crosstrain.config.load import load_config
from crosstrain.config.registry import registry
from crosstrain.config.schema import Checker, defaults
from crosstrain.config.sources import merge
from crosstrain.data.loader import training_steps
from crosstrain.data.splits import open_split, prepare_data
from crosstrain.engine.build import build_model
from crosstrain.engine.runner import Runner

BATCH, ENCODER = 16, "vit_base_patch16_224"
TEXT = "red circle top left"


def write_images(folder: Path, count: int) -> None:
    """Write the same noisy JPEGs as files and in a shard."""
    rng = np.random.default_rng(0)
    with tarfile.open(folder / "all.tar", "w") as tar:
        for i in range(count):
            small = rng.integers(0, 256, (32, 32, 3), dtype=np.uint8)
            out = io.BytesIO()
            Image.fromarray(small).resize((256, 256), Image.Resampling.BICUBIC).save(out, "JPEG", quality=90)
            (folder / f"{i:06d}.jpg").write_bytes(out.getvalue())
            for extension, data in (("jpg", out.getvalue()), ("txt", TEXT.encode())):
                info = tarfile.TarInfo(f"{i:06d}.{extension}")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))


class Files(torch.utils.data.Dataset):
    """A simple dataset of files."""

    def __init__(self, folder: Path, transform: Any, tokenizer: Any) -> None:
        self.paths, self.transform, self.tokenizer = sorted(folder.glob("*.jpg")), transform, tokenizer

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        image = Image.open(self.paths[i]).convert("RGB")
        return self.transform(image), torch.tensor(self.tokenizer.encode(TEXT).ids)


def from_shards(dataset: Any) -> dict[str, float]:
    batches = len(dataset) // BATCH
    steps = training_steps(dataset, BatchPlan(BATCH, BATCH, 1, 1), seed=0, start=0, dp_rank=0)
    started = time.perf_counter()
    for _ in range(batches):
        next(steps)
    return {"images": batches * BATCH / (time.perf_counter() - started)}


def from_files(files: Files) -> dict[str, float]:
    loader = DataLoader(files, batch_size=BATCH, shuffle=True, drop_last=True)
    started = time.perf_counter()
    for _ in loader:
        pass
    return {"images": len(loader) * BATCH / (time.perf_counter() - started)}


def prepared(folder: Path) -> tuple[Runner, Any]:
    """Return the small vision-language model under the single-process runner, and the batch of a step."""
    options = [f"datasets.shapes.path={folder}/shapes", "datasets.shapes.images=64", "datasets.shapes.held_out=4"]
    config = load_config(ROOT / "projects" / "blip2_qwen_shapes.yaml", options)
    prepare_data(config)
    runner = Runner(None, config.run)
    runner.setup()
    build_model(config, runner, None, for_training=True)
    plan = BatchPlan.of(config.run, 1)
    steps = training_steps(open_split(config, "train"), plan, seed=0, start=0, dp_rank=0)
    return runner, next(steps)


def platform_steps(runner: Runner, batches: Any, steps: int) -> dict[str, float]:
    targets = runner.model.num_targets(batches[0].data)
    runner.set_learning_rate(1e-5)
    seconds = []
    for _ in range(steps):
        started = time.perf_counter()
        runner.forward_backward(batches, targets)
        runner.optimizer_step()
        seconds.append(time.perf_counter() - started)
    return {"tokens": sum(b.data["input_ids"].numel() for b in batches) / statistics.median(seconds)}


def bare_steps(runner: Runner, batches: Any, steps: int) -> dict[str, float]:
    model, batch = runner.model, batches[0].data
    targets = runner.model.num_targets(batch)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, betas=(0.9, 0.98), weight_decay=0.05, fused=True)
    seconds = []
    for _ in range(steps):
        started = time.perf_counter()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(**batch) / targets
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss.item()
        seconds.append(time.perf_counter() - started)
    return {"tokens": sum(b.data["input_ids"].numel() for b in batches) / statistics.median(seconds)}


def opened(folder: Path) -> Any:
    """Open the shard as the platform does."""
    cls, component = registry.get("dataset", "image_text"), {"name": "image_eval", "encoder": ENCODER}
    given = {
        "train": f"{folder}/all.tar", "tokenizer": f"{folder}/shapes/tokenizer",
        "vis_processor": {"train": component, "eval": component},
    }  # fmt: skip
    options = Checker(".".join).dataclass(cls.Options, merge(defaults(cls.Options), given), ())
    cls.prepare(options)
    return cls(options, "train")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--images", type=int, default=400)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--quick", action="store_true", help="see that it works; figures of no worth")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.rounds, arguments.images, arguments.steps = 1, 2 * BATCH, 1
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
        runner, batches = prepared(folder)
        steps = {"platform": platform_steps, "bare": bare_steps}
        stepping = rounds(list(steps), lambda name: steps[name](runner, batches, arguments.steps), arguments.rounds)
        torch.set_num_threads(1)
        write_images(folder, arguments.images)
        dataset = opened(folder)
        processor = registry.get("processor", "image_eval")
        transform = processor(processor.Options(encoder=ENCODER)).transform
        files = Files(folder, transform, dataset.encoder.tokenizer.backend)
        loading = rounds(
            ["shards", "files"],
            lambda name: from_shards(dataset) if name == "shards" else from_files(files),
            arguments.rounds,
        )
        print(
            "images per second on one core, from shards / from files:",
            ratio(loading["shards"], loading["files"], "images"),
        )
        print("median from shards:", round(statistics.median(r["images"] for r in loading["shards"])))
        print("tokens per second, platform / bare loop:", ratio(stepping["platform"], stepping["bare"], "tokens"))
        print("median of the platform:", round(statistics.median(r["tokens"] for r in stepping["platform"])))


if __name__ == "__main__":
    main()
