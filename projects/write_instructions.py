"""Write a small data set of instructions: images, and JSON in LLaVA's and in MiniGPT4Qwen's layout.

python projects/write_instructions.py --output data/instructions
"""

from __future__ import annotations

import argparse
import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "platform"))

from crosstrain import registry

PLUGINS = "crosstrain_plugins.builtin.datasets"


def write(folder: Path, images: int) -> None:
    """Write `images` images of coloured shapes, two files of annotations and a tokenizer to `folder`."""
    registry.names("dataset")  # which makes the plugins importable
    scenes, shapes = (import_module(f"{PLUGINS}.synthetic_{name}") for name in ("scenes", "shapes"))
    (folder / "images").mkdir(parents=True)
    shapes.write_tokenizer(folder)
    conversations: list[dict[str, Any]] = []
    instructions: list[dict[str, Any]] = []
    for i in range(images):
        rng = np.random.default_rng(i)
        scene = scenes.draw_scene("train", rng, 1, 2)
        about, name = scenes.describe(scene, rng), f"{i:06d}.jpg"
        (folder / "images" / name).write_bytes(scenes.render(scene, rng))
        conversations.append({"image": name, "conversations": about["conversations"]})
        asked = about["questions"][0]
        instructions.append({"image": name, "instruction": asked["question"], "output": asked["answer"]})
    (folder / "llava.json").write_text(json.dumps(conversations))
    (folder / "minigpt4qwen.json").write_text(json.dumps(instructions))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--images", type=int, default=2000)
    arguments = parser.parse_args()
    write(arguments.output, arguments.images)
