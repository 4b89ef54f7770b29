"""Image processors for vision encoders: timm's transforms, with the encoder's size, mean and standard deviation."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
import timm
import torch
from annotated_types import Interval
from PIL import Image
from timm.data import create_transform, resolve_data_config
from timm.data.auto_augment import AugmentOp, RandAugment

from crosstrain import Fraction, OptionError, PositiveFloat, Text, registry

_OTHERS = ("encoder", "image_size", "augment")  # options that are not arguments of timm's `create_transform`


class _Transform:
    """Base class of image processors: applies one of timm's transforms."""

    def __init__(self, options: "_Options", is_training: bool = False) -> None:
        """options: arguments of `create_transform`, and the options in `_OTHERS`."""
        size = None if options.image_size is None else (3, options.image_size, options.image_size)
        arguments = vars(options) | {"input_size": size, "is_training": is_training}
        given = {key: value for key, value in arguments.items() if value is not None and key not in _OTHERS}
        if options.encoder is not None:
            config = resolve_data_config(pretrained_cfg=_published(options.encoder))
            given = {k: config[k] for k in ("input_size", "mean", "std", "interpolation", "crop_pct")} | given
        self.transform = create_transform(**given)

    def __call__(self, image: Any, rng: np.random.Generator) -> np.ndarray:
        """Return a PIL image as fp32 [3, height, width], normalized by mean and standard deviation."""
        return self.transform(image).numpy()


def _published(encoder: str) -> dict[str, Any]:
    """Return timm's configuration for an encoder. Raises OptionError if timm has no model with this name."""
    config = timm.get_pretrained_cfg(encoder, allow_unregistered=False) if timm.is_model(encoder) else None
    if config is None:
        near = timm.list_models(f"*{encoder.split('_')[0]}*")[:3]
        raise OptionError(
            "encoder", f"timm has no model {encoder}" + (f"; similar names: {', '.join(near)}" if near else "")
        )
    return config.to_dict()


@contextmanager
def _drawing_from(rng: np.random.Generator) -> Iterator[None]:
    """Seed Python's, numpy's and torch's global generators from `rng` inside the block, and restore them afterwards."""
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        random.seed(int(rng.integers(2**32)))
        torch.default_generator.manual_seed(int(rng.integers(2**32)))
        np.random.seed(int(rng.integers(2**32)))
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)


def _random_augment() -> RandAugment:
    """Return BLIP's RandomAugment(2, 5): two of ten operations, each applied with probability 0.5."""
    names = (
        *("AutoContrast", "Equalize", "ShearX", "ShearY", "TranslateX", "TranslateY", "Rotate"),
        *("Brightness", "Sharpness", "Brightness"),  # these have no effect at magnitude 5, like BLIP's Identity
    )
    hparams = {"translate_const": 10, "img_mean": (128, 128, 128), "interpolation": Image.Resampling.BILINEAR}
    return RandAugment([AugmentOp(name, prob=0.5, magnitude=5, hparams=hparams) for name in names], num_layers=2)


Share = Annotated[float, Interval(gt=0, le=1)]


@dataclass
class _Options:
    encoder: Text | None = None  # timm model that sets the defaults of size, mean, std and interpolation
    # height and width in pixels; None: the encoder's size, or 224 without an encoder
    image_size: Annotated[int, Interval(ge=1, le=8192)] | None = None
    mean: list[Fraction] | None = None  # mean per channel, from 0 to 1; None: the encoder's, or ImageNet's
    std: list[Share] | None = None  # standard deviation per channel; None: the encoder's, or ImageNet's
    # interpolation for resizing; None: the encoder's, or bicubic
    interpolation: Literal["nearest", "bilinear", "bicubic", "box", "hamming", "lanczos"] | None = None

    def __post_init__(self) -> None:
        if any(values is not None and len(values) != 3 for values in (self.mean, self.std)):
            raise OptionError("mean", "mean and std need three numbers each, one per channel")
        if self.encoder is not None:
            _published(self.encoder)


@registry.register_processor("image_train")
class ImageTrain(_Transform):
    """Crop, flip and recolour an image at random: timm's training transform."""

    @dataclass
    class Options(_Options):
        """Options; the defaults are BLIP-2's: crop to at least half the area, flip half the time, keep colours."""

        scale: tuple[Share, Share] = (0.5, 1.0)  # smallest and largest area of the crop, as a fraction of the image
        ratio: tuple[PositiveFloat, PositiveFloat] = (3 / 4, 4 / 3)  # range of the crop's aspect ratio, width / height
        hflip: Fraction = 0.5  # probability of a horizontal flip; use 0 if texts mention left and right
        color_jitter: Fraction = 0.0  # largest relative change of brightness, contrast and saturation
        augment: bool = False  # shear, shift, rotate and recolour at random, as in BLIP

        def __post_init__(self) -> None:
            super().__post_init__()
            for name in ("scale", "ratio"):
                if (pair := getattr(self, name))[0] > pair[1]:
                    raise OptionError(name, f"the minimum {pair[0]:g} is above the maximum {pair[1]:g}")

    def __init__(self, options: Options) -> None:
        super().__init__(options, is_training=True)
        if options.augment:
            self.transform.transforms.insert(-2, _random_augment())  # augment before the conversion to a tensor

    def __call__(self, image: Any, rng: np.random.Generator) -> np.ndarray:
        """Transform an image; all random numbers come from the sample's generator."""
        with _drawing_from(rng):
            return super().__call__(image, rng)


@registry.register_processor("image_eval")
class ImageEval(_Transform):
    """Resize and crop an image without randomness: timm's evaluation transform."""

    @dataclass
    class Options(_Options):
        """Options; the default is BLIP-2's: the full image, resized to the encoder's size."""

        crop_mode: Literal["squash", "center"] = "squash"  # squash: ignore the aspect ratio; center: crop the edges
        crop_pct: Annotated[float, Interval(ge=0.25, le=1)] = 1.0  # fraction of height and width to keep
