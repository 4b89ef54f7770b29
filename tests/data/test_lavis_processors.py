"""LAVIS's names of processors stand for what LAVIS does."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision import transforms
from torchvision.transforms.functional import InterpolationMode

from crosstrain.config.load import load_config
from crosstrain.config.registry import registry

CLIP = transforms.Normalize((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))


@pytest.fixture(scope="module")
def image() -> Image.Image:
    pixels = np.random.default_rng(0).integers(0, 256, (12, 16, 3), dtype=np.uint8)
    return Image.fromarray(pixels).resize((160, 120), Image.Resampling.BICUBIC)


def processor(folder: Path, which: str, name: str, **options: Any) -> Any:
    """Make the processor that a project's dataset names."""
    part = f"datasets.x.{which}.train={{name: {name}, {', '.join(f'{k}: {v}' for k, v in options.items())}}}"
    (folder / "p.yaml").write_text(
        "model: {arch: blip2_qwen, model_type: shapes}\n"
        "datasets: {x: {name: instructions, annotations: a, images: b, tokenizer: c}}\n"
        "run: {output_dir: o, max_iters: 1, micro_batch_size: 1}\n"
    )
    made = getattr(load_config(folder / "p.yaml", [part]).datasets["x"].options, which).train
    return registry.get("processor", made.name)(made.options)


def test_the_eval_processor_is_lavis_transform(tmp_path: Path, image: Image.Image) -> None:
    steps = [transforms.Resize((224, 224), interpolation=InterpolationMode.BICUBIC), transforms.ToTensor(), CLIP]
    expected = transforms.Compose(steps)(image).numpy()
    made = processor(tmp_path, "vis_processor", "blip_image_eval", image_size=224)(image, np.random.default_rng(0))
    assert np.abs(made - expected).max() < 1e-5  # the same PIL and the same arithmetic


def global_states() -> list[bytes]:
    return [
        str(random.getstate()).encode(),
        np.random.get_state()[1].tobytes(),
        torch.get_rng_state().numpy().tobytes(),
    ]


@pytest.mark.parametrize("name", ["blip2_image_train", "blip_image_train"])
def test_a_training_processor_depends_on_its_generator_alone(tmp_path: Path, image: Image.Image, name: str) -> None:
    made = processor(tmp_path, "vis_processor", name, image_size=64)
    before = global_states()
    first, again, other = (made(image, np.random.default_rng(seed)) for seed in (1, 1, 2))
    assert first.shape == (3, 64, 64)
    assert (first == again).all()
    assert (first != other).any()
    assert global_states() == before


def test_blip_augments_half_the_time_and_by_two_operations(tmp_path: Path, image: Image.Image) -> None:
    """Of ten operations three change nothing, so that 0.5775 of the images are changed: 1 - (1 - 0.5 * 0.7) ** 2."""
    options = {"image_size": 64, "hflip": 0.0, "scale": [1.0, 1.0], "ratio": [1.33, 1.34]}
    plain, augmented = (
        processor(tmp_path, "vis_processor", name, **options) for name in ("blip2_image_train", "blip_image_train")
    )
    changed = [
        bool(np.abs(plain(image, np.random.default_rng(i)) - augmented(image, np.random.default_rng(i))).max() > 0.01)
        for i in range(300)
    ]
    assert abs(np.mean(changed) - 0.5775) < 4 * (0.5775 * 0.4225 / 300) ** 0.5  # four standard errors


def test_captions_are_cleaned_and_cut(tmp_path: Path) -> None:
    made = processor(tmp_path, "text_processor", "blip_caption", prompts="['a photo of ']")
    annotation = {"caption": 'A Man:  "Hello", (he said) #1!\n' + "word " * 60}
    ((asked, told),) = made(annotation, 1, np.random.default_rng(0))
    assert asked.text.endswith("a photo of ")
    assert told.text.startswith("a man hello , he said 1 word")
    assert len(told.text.split()) == 50


def test_captions_that_are_not_cleaned_keep_their_lines(tmp_path: Path) -> None:
    made = processor(tmp_path, "text_processor", "blip_caption", clean="false", max_words="null")
    caption = "# Receipt\n\n| tea  | 2 |"
    ((_, told),) = made({"caption": caption}, 1, np.random.default_rng(0))
    assert told.text == caption
