"""A synthetic task for policy gradients: sums of five digits."""

import itertools
import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from crosstrain import Batch, Dataset, FilePath, NonNegativeInt, Split, registry, write_json

from ..commands.prepare.prepare import make_once
from .chat import Chat, ConversationOptions
from .prompts import Prompts

_END, _UNKNOWN = "<end>", "<unknown>"
_SUMMANDS, _LARGEST = 5, 3  # number of summands, and the largest one
_VAL, _TEST = 100, 200  # number of sums in these splits
_TEMPLATE = "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}{{ '<end>' }}{% endif %}{% endfor %}"


@registry.register_dataset("arithmetic")
class Arithmetic(Prompts):
    """Prompts such as `3+0+2+1+1=`, with the sum, a digit, as the answer; written on first use.

    Every sum of five digits from 0 to 3 that is below 10 occurs once, in one of the splits.
    """

    @dataclass
    class Options:
        """The folder of the data, and the kind of samples."""

        path: FilePath  # folder of the problems and their tokenizer; created if it does not exist
        guesses: bool = False  # samples are problems with random digits as answers, to train a first model on
        data_seed: NonNegativeInt = 0  # seed of the order of the problems and of the random answers

    @classmethod
    def files(cls, options: Any) -> Any:
        """Return the options of the dataset of conversations that reads the files."""
        folder = Path(options.path).expanduser()
        given: dict[str, Any] = {
            "path": f"{folder}/{'guesses' if options.guesses else 'train'}.jsonl", "val": f"{folder}/val.jsonl",
            "test": f"{folder}/test.jsonl", "tokenizer": f"{folder}/tokenizer", "seq_length": 12,
        }  # fmt: skip
        return Chat.Options(**given) if options.guesses else ConversationOptions(**given)

    @classmethod
    def open(cls, options: Any, split: Split) -> Dataset:
        return (Chat if options.guesses else cls)(cls.files(options), split)

    @classmethod
    def shapes(cls, options: Any) -> Batch:
        return (Chat if options.guesses else super()).shapes(cls.files(options))

    @classmethod
    def tokenizer_of(cls, options: Any) -> str | None:
        return None

    @classmethod
    def named_splits(cls, options: Any) -> list[Split]:
        return ["val", "test"]

    @classmethod
    def is_prepared(cls, options: Any) -> bool:
        return False

    @classmethod
    def prepare(cls, options: Any) -> None:
        """Write the files into a new folder, unless it exists, and tokenize them."""
        folder = Path(options.path).expanduser().absolute()
        make_once(folder, partial(_write, np.random.default_rng(options.data_seed)))
        (Chat if options.guesses else Prompts).prepare(cls.files(options))


def _write(rng: np.random.Generator, folder: Path) -> None:
    every = [digits for digits in itertools.product(range(_LARGEST + 1), repeat=_SUMMANDS) if sum(digits) < 10]
    shuffled = [every[i] for i in rng.permutation(len(every))]
    splits = {"val": shuffled[:_VAL], "test": shuffled[_VAL : _VAL + _TEST], "train": shuffled[_VAL + _TEST :]}
    for split, chosen in splits.items():
        _write_rows(folder / f"{split}.jsonl", [(digits, sum(digits)) for digits in chosen])
    _write_rows(folder / "guesses.jsonl", [(digits, int(rng.integers(10))) for digits in splits["train"]])
    target = folder / "tokenizer"
    target.mkdir()
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate([*"0123456789+=", _UNKNOWN])}, _UNKNOWN))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([AddedToken(_END, special=True, normalized=False)])
    backend.save(str(target / "tokenizer.json"))
    config = {"eos_token": _END, "unk_token": _UNKNOWN, "chat_template": _TEMPLATE}
    write_json(target / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **config})


def _write_rows(path: Path, rows: list[tuple[tuple[int, ...], int]]) -> None:
    with path.open("w", encoding="utf-8") as file:
        for digits, answer in rows:
            question = "+".join(map(str, digits)) + "="
            turns = [{"role": "user", "content": question}, {"role": "assistant", "content": str(answer)}]
            file.write(json.dumps({"messages": turns}) + "\n")
