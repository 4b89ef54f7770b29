"""A synthetic vision benchmark: questions about pictures of coloured shapes."""

import json
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from annotated_types import Interval
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from webdataset import ShardWriter

from crosstrain import (
    DataError,
    FilePath,
    NonNegativeInt,
    Processors,
    Split,
    Text,
    derive_seed,
    processors,
    registry,
    write_json,
)

from ..commands.prepare.prepare import make_once
from .image_text import ImageText
from .synthetic_scenes import CELL, describe, draw_scene, render, words
from .webdataset import expand

# (end of the phase in percent of the training pictures, (minimum, maximum) number of objects in a picture)
_CURRICULUM = [(7, (1, 1)), (14, (1, 2)), (21, (2, 3)), (100, (2, 4))]
_PER_SHARD = 5_000  # pictures
_SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
# Attributes of the tokenizer that InternVL's processor reads -> tokens
_OF_IMAGES = {
    "start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>",
    "video_token": "<video>",
}  # fmt: skip
_UNKNOWN = "<|unknown|>"  # token for all other words
_CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# The same with contents in parts. An image is a grid of 3 x 3 cells, and each cell becomes a token.
_WITH_IMAGES = _CHATML.replace(
    " + m['content'] + '<|im_end|>'",
    " }}{% for part in m['content'] %}{% if part['type'] == 'image' %}"
    "{{ '<IMG_CONTEXT>' }}{% else %}{{ part['text'] }}{% endif %}{% endfor %}"
    "{{ '<|im_end|>'",
)


@registry.register_dataset("shapes")
class Shapes(ImageText):
    """Coloured shapes on a grid, rendered on first use into WebDataset shards, with a tokenizer of 51 tokens.

    The folder `path`/processor has a processor of InternVL, for models that take one (`processor`).

    The splits are train, val and test. With the option `novel`, every picture of the test split has a combination of
    colour and shape that never occurs in training.
    """

    @dataclass(kw_only=True)
    class Options(ImageText.Options):
        """Number, seed and folder of the pictures, and the options of `image_text`."""

        path: FilePath  # folder of the shards and their tokenizer; created if it does not exist
        vis_processor: Processors = field(
            default_factory=lambda: processors("image_eval", "image_eval", image_size=48)  # images are never flipped
        )
        text_processor: Processors = field(default_factory=lambda: processors("vqa", "vqa"))
        # annotation keys that are not reported as unused; every sample has the three default keys
        ignore_columns: list[Text] = field(default_factory=lambda: ["caption", "questions", "conversations"])
        images: Annotated[int, Interval(ge=1, le=10**8)] = 24_000  # pictures in the train split
        held_out: Annotated[int, Interval(ge=1, le=10**8)] = 1_000  # pictures in each of val, test and novel
        data_seed: NonNegativeInt = 0  # seed for drawing the pictures; each split derives its own seed
        curriculum: bool = False  # pictures with few objects come first; training keeps this order
        novel: bool = False  # use the split `novel` as the test split

        def __post_init__(self) -> None:
            self.tokenizer = self.tokenizer or str(Path(self.path).expanduser() / "tokenizer")

    options: Options

    def training_index(self, seed: int, number: int) -> int:
        return number % len(self) if self.options.curriculum else super().training_index(seed, number)

    @classmethod
    def prepare(cls, options: Any) -> None:
        """Render the shards into a new folder that appears atomically. An existing folder is not changed.

        Raises DataError if an existing folder was made with other options.
        """
        made = {key: getattr(options, key) for key in ("images", "held_out", "data_seed", "curriculum")}
        folder = Path(options.path).expanduser().absolute()
        make_once(folder, partial(_write, options, made))
        _check_made(folder, made)
        super().prepare(options)

    @classmethod
    def shards(cls, options: Any, split: Split) -> list[str]:
        name = "novel" if split == "test" and options.novel else split
        return expand(f"{Path(options.path).expanduser()}/{name}-*.tar")


def _check_made(folder: Path, made: dict[str, Any]) -> None:
    try:
        there = json.loads((folder / "dataset.json").read_text(encoding="utf-8"))["options"]
    except (OSError, ValueError, KeyError):
        raise DataError(f"{folder} exists but was not made by this dataset: choose a different folder") from None
    for key in (key for key, value in made.items() if there.get(key) != value):
        raise DataError(
            f"{folder} was made with {key}={there.get(key)!r}, but {key} is now {made[key]!r}: choose a different "
            f"folder, or remove this one"
        )


def _write(options: Shapes.Options, made: dict[str, Any], folder: Path) -> None:
    """Write the tokenizer, the processor, SPLIT-NNNNNN.tar files, and a file with the options `made`."""
    write_tokenizer(folder)
    write_processor(folder)
    write_json(folder / "dataset.json", {"options": made})
    for split in ("train", "val", "test", "novel"):
        number = options.images if split == "train" else options.held_out
        with ShardWriter(str(folder / f"{split}-%06d.tar"), maxcount=_PER_SHARD, verbose=0) as writer:
            for i in range(number):
                rng = np.random.default_rng(derive_seed(options.data_seed, split, i))
                least, most = (1, 4) if split == "train" else (2, 4)
                if split == "train" and options.curriculum:
                    least, most = next(things for end, things in _CURRICULUM if 100 * i < end * number)
                scene = draw_scene(split, rng, least, most)
                annotation = json.dumps(describe(scene, rng)).encode()
                writer.write({"__key__": f"{i:08d}", "jpg": render(scene, rng), "json": annotation})


def write_tokenizer(folder: Path) -> None:
    """Write a word-level Hugging Face tokenizer to `folder`/tokenizer, with Qwen's chat template."""
    target = folder / "tokenizer"
    target.mkdir(parents=True)
    _backend(_SPECIAL).save(str(target / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "unk_token": _UNKNOWN,
        "pad_token": _SPECIAL[0], "chat_template": _CHATML, "clean_up_tokenization_spaces": False,
    }  # fmt: skip
    write_json(target / "tokenizer_config.json", config)


def write_processor(folder: Path) -> None:
    """Write a processor of InternVL to `folder`/processor: an image of 48 x 48 pixels becomes 9 tokens."""
    from transformers import GotOcr2ImageProcessor, InternVLProcessor, InternVLVideoProcessor, PreTrainedTokenizerFast

    size = {"height": 3 * CELL, "width": 3 * CELL}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=_backend([*_SPECIAL, *_OF_IMAGES.values()]),
        eos_token="<|im_end|>",
        unk_token=_UNKNOWN,
        pad_token=_SPECIAL[0],
        extra_special_tokens=_OF_IMAGES,
        clean_up_tokenization_spaces=False,
    )
    processor = InternVLProcessor(
        GotOcr2ImageProcessor(size=size, crop_to_patches=False),
        tokenizer,
        InternVLVideoProcessor(size=size),
        image_seq_length=9,
        chat_template=_WITH_IMAGES,
    )
    processor.save_pretrained(folder / "processor")


def _backend(special: list[str]) -> Tokenizer:
    """Return a word-level tokenizer with special tokens."""
    vocabulary = {word: i for i, word in enumerate([*words(), "user", "assistant", "system", _UNKNOWN])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token=_UNKNOWN))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return backend
