"""Tokenizers for documents: any Hugging Face one, GPT-2's two files, or one trained here.

Encoding needs only the `tokenizers` library; `transformers`, slow to import, is used for what is neither a
`tokenizer.json` nor GPT-2's files.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from crosstrain.utils.assets import TOKENIZER_FILES, copy_files, plain_files
from crosstrain.utils.errors import DataError
from crosstrain.utils.files import read_regular, write_json
from crosstrain.utils.trust import check_source

TOKENIZER, CONFIG = "tokenizer.json", "tokenizer_config.json"  # files in a tokenizer's folder, and in a model's
_MOST_BYTES = 1 << 27  # of each
END_OF_TEXT = "<|endoftext|>"
_MOST_TOKENS = 1 << 20
_LONG = 1000  # characters of a word from which on it is cut: time to learn its pairs grows with its length squared
_LONG_WORDS = re.compile(rf"(?<!\S)\S{{{_LONG},}}|(?<!\s)\s{{{_LONG},}}")
_USUAL_ENDS = (END_OF_TEXT, "</s>", "<|end_of_text|>", "<eos>", "<|eos|>", "[SEP]")


@dataclass(frozen=True)
class TextTokenizer:
    """Turns documents into token ids. Text is only ever text: `<|endoftext|>` written in a document is no end."""

    backend: Tokenizer
    end: str  # the token that ends a document
    save: Callable[[Path], None]  # writes the folder that transformers' AutoTokenizer.from_pretrained opens

    def __post_init__(self) -> None:
        if self.backend.token_to_id(self.end) is None:
            raise DataError(f"the tokenizer has no token {self.end!r}, which its configuration says ends a text")
        self.backend.no_truncation()
        self.backend.no_padding()
        self.backend.encode_special_tokens = True

    @cached_property
    def vocab_size(self) -> int:
        """Ids are below this."""
        return 1 + max(self.backend.get_vocab().values())

    @cached_property
    def end_id(self) -> int:
        return self.backend.get_vocab()[self.end]

    def encode(self, text: str) -> list[int]:
        return self.backend.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """`encode` of each, on all cores, without the offsets that nobody asked for."""
        return [encoding.ids for encoding in self.backend.encode_batch_fast(texts, add_special_tokens=False)]

    def decode(self, ids: list[int]) -> str:
        return self.backend.decode(ids, skip_special_tokens=False)


def load_tokenizer(spec: str | Path) -> TextTokenizer:
    """A tokenizer by folder (tokenizer.json, or GPT-2's vocab.json and merges.txt), file, or Hugging Face name.

    Raises DataError when there is none under that name, or when it names no token that ends a text.
    """
    path = Path(spec).expanduser()
    if path.exists() and not path.is_dir():
        return _from_file(path, {})
    if not path.exists():
        if Path(spec).is_absolute() or str(spec).startswith((".", "~")):
            raise DataError(f"there is no tokenizer at {spec}")
        return _from_transformers(str(spec))
    config = _read_json(path / CONFIG) if (path / CONFIG).exists() else {}
    if (path / TOKENIZER).exists():
        return _from_file(path / TOKENIZER, config)
    gpt2_files = (path / "vocab.json", path / "merges.txt")
    if all(map(Path.exists, gpt2_files)) and "GPT2" in str(config.get("tokenizer_class", "GPT2")):
        loaded = load_gpt2(*gpt2_files)
        return replace(loaded, save=_copier(loaded.backend, path)) if config else loaded
    return _from_transformers(str(path))


# What transformers is told of a checkpoint's tokenizer_config.json: names of tokens, and nothing that names a file, an
# address or a class.
_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_TOLD = (
    *("model_max_length", "padding_side", "truncation_side", "clean_up_tokenization_spaces", "split_special_tokens"),
    "chat_template",
)


def stored_tokenizer(folder: Path) -> dict[str, Any]:
    """Arguments for transformers' PreTrainedTokenizerFast, from the two files and the chat template in `folder`.

    Raises DataError where they cannot be read, and for a tokenizer that is code of its own.
    """
    import transformers

    config = _read_json(folder / CONFIG)
    if "auto_map" in config and not hasattr(transformers, str(config.get("tokenizer_class"))):
        raise DataError(f"{folder / CONFIG} asks for code that comes with the tokenizer, which is not run")
    told = {key: config[key] for key in _TOLD if config.get(key) is not None}
    told |= {key: _content(config[key]) for key in _SPECIAL if config.get(key) is not None}
    more = config.get("extra_special_tokens") or config.get("additional_special_tokens")
    if isinstance(more, list):
        told["extra_special_tokens"] = [_content(token) for token in more]
    if (template := folder / "chat_template.jinja").exists():
        told["chat_template"] = _read(template).decode()
    return told | {"tokenizer_object": _backend(folder / TOKENIZER)}


def _content(token: Any) -> str:
    return str(token["content"] if isinstance(token, dict) else token)


def load_gpt2(vocab_file: str | Path, merge_file: str | Path) -> TextTokenizer:
    """GPT-2's byte-level BPE from its two files, as Megatron-LM takes them."""
    for path in (vocab_file, merge_file):
        check_source(f"the tokenizer {path}")
        if not Path(path).is_file():
            raise DataError(f"the tokenizer file {path} does not exist, or is not a regular file")
    try:
        model = models.BPE.from_file(str(vocab_file), str(merge_file))
    except Exception as error:  # the Rust side raises nothing finer
        raise DataError(f"{vocab_file} and {merge_file} are not a BPE vocabulary and its merges: {error}") from None
    return _byte_level(Tokenizer(model))


def train_bpe(texts: Iterable[str], vocab_size: int, progress: bool = False) -> TextTokenizer:
    """Byte-level BPE like GPT-2's (Radford et al. 2019), trained on texts, with `<|endoftext|>` as its last id.

    vocab_size counts everything: 256 bytes, merges, `<|endoftext|>`. Fewer result where texts hold fewer pairs that
    occur twice. DataError when vocab_size is below 257, or above 1,048,576.
    """
    if vocab_size < 257:
        raise DataError(f"a vocabulary of {vocab_size} is too small: 256 bytes and {END_OF_TEXT} need 257")
    if vocab_size > _MOST_TOKENS:  # the Rust side takes memory for all of them at once
        raise DataError(f"a vocabulary of {vocab_size} is too large: at most {_MOST_TOKENS} can be trained")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 1,
        min_frequency=2,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=progress,
    )
    tokenizer.train_from_iterator(chain.from_iterable(map(_in_parts, texts)), trainer)
    return _byte_level(tokenizer)


def _in_parts(text: str) -> Iterator[str]:
    """A text, cut in the middle of its longest words."""
    start = 0
    for found in _LONG_WORDS.finditer(text):
        for stop in range(found.start() + _LONG, found.end(), _LONG):
            yield text[start:stop]
            start = stop
    yield text[start:]


def vocabulary(path: Path) -> dict[str, int]:
    """Ids by token, added ones included, of a tokenizer.json. DataError where it cannot be read."""
    return _backend(path).get_vocab(with_added_tokens=True)


def same_vocabulary(first: Path | None, second: Path | None) -> bool:
    """Whether the tokenizers in two folders give every token the same id; None, no tokenizer, is like itself alone."""
    if first is None or second is None or first == second:
        return first == second
    one, other = first / TOKENIZER, second / TOKENIZER
    return one.read_bytes() == other.read_bytes() or vocabulary(one) == vocabulary(other)


def cached_folder(tokenizer: TextTokenizer) -> Path:
    """Save the tokenizer in a folder under $XDG_CACHE_HOME/crosstrain, named by the content of its files."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "crosstrain" / "tokenizers"
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as partial:
        new = Path(partial) / "new"
        tokenizer.save(new)
        digest = hashlib.sha256()
        for path in sorted(new.iterdir()):  # a chat template too: what is alike in tokenizer.json may differ there
            data = path.read_bytes()
            digest.update(f"{path.name}/{len(data)}/".encode() + data)
        folder = cache / digest.hexdigest()[:16]
        if not folder.exists():
            try:
                os.rename(new, folder)
            except OSError:
                if not folder.exists():  # otherwise another process was quicker with the same content
                    raise
    return folder


def _byte_level(tokenizer: Tokenizer) -> TextTokenizer:
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    tokenizer.add_special_tokens([END_OF_TEXT])  # takes the next id, the last, unless the vocabulary has it
    return TextTokenizer(tokenizer, END_OF_TEXT, lambda folder: _write(tokenizer, END_OF_TEXT, folder))


def _from_file(path: Path, config: dict) -> TextTokenizer:
    backend = _backend(path)
    end = config.get("eos_token")
    end = end["content"] if isinstance(end, dict) else end
    end = end or next((token for token in _USUAL_ENDS if backend.token_to_id(token) is not None), None)
    if end is None:
        raise DataError(f"{path} names no token that ends a text: set eos_token in tokenizer_config.json beside it")

    save = _copier(backend, path.parent) if config else lambda folder: _write(backend, end, folder)
    return TextTokenizer(backend, end, save)


def _copier(backend: Tokenizer, source: Path) -> Callable[[Path], None]:
    """Saves the files of a tokenizer's folder as they are, with a tokenizer.json if it has none."""

    def save(folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        copy_files(plain_files(source, TOKENIZER_FILES), folder)
        if not (folder / TOKENIZER).exists():
            backend.save(str(folder / TOKENIZER))

    return save


def _backend(path: Path) -> Tokenizer:
    """The tokenizer that a tokenizer.json describes; DataError where it does not."""
    try:
        return Tokenizer.from_buffer(_read(path))
    except DataError:
        raise
    except Exception as error:  # the Rust side raises nothing finer
        raise DataError(f"{path} is not a tokenizer: {error}") from None


def _from_transformers(spec: str) -> TextTokenizer:
    check_source(f"the tokenizer {spec}")
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(spec, trust_remote_code=False)
    except (OSError, ValueError) as error:
        reason = str(error).strip().split("\n")[0]
        raise DataError(f"no tokenizer {spec!r}, neither as a folder nor on the Hugging Face hub: {reason}") from None
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or tokenizer.eos_token is None:
        lack = "fast (Rust) form" if backend is None else "token that ends a text (eos_token)"
        raise DataError(f"the tokenizer {spec!r} has no {lack}")

    def save(folder: Path) -> None:
        tokenizer.save_pretrained(str(folder))

    return TextTokenizer(backend, tokenizer.eos_token, save)


def _write(backend: Tokenizer, end: str, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **dict.fromkeys(("bos_token", "eos_token", "unk_token"), end),
        "clean_up_tokenization_spaces": False,
    }
    write_json(folder / "tokenizer_config.json", config)


def _read_json(path: Path) -> dict:
    try:
        found = json.loads(_read(path))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise DataError(f"{path} is not a JSON object")
    return found


def _read(path: Path) -> bytes:
    try:
        return read_regular(path, _MOST_BYTES)
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror})") from None
