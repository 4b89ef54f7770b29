"""Tokenizers for documents: from Hugging Face, or from GPT-2's two files.

Encoding needs only the `tokenizers` library. `transformers` is slow to import, so it is used only
for tokenizers that have neither a `tokenizer.json` nor GPT-2's files.
"""

import hashlib
import json
import os
import tempfile
from array import array
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from crosstrain.config.pretrained_folder import as_folder
from crosstrain.utils.assets import MODEL_FILES, TOKENIZER_FILES, copy_files, plain_files
from crosstrain.utils.errors import DataError, explained, first_line, os_errors_as
from crosstrain.utils.files import cache_folder, last_checkpoint, read_regular, write_json
from crosstrain.utils.limited_process import LimitedProcess, LimitError
from crosstrain.utils.logging import log
from crosstrain.utils.paths import near
from crosstrain.utils.trust import check_source

# Files in the folders of tokenizers and models.
TOKENIZER, CONFIG, CHAT_TEMPLATE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"
_MAX_BYTES = 1 << 27  # maximum size of each file, in bytes
END_OF_TEXT = "<|endoftext|>"
_MOST_IDS = 1 << 24  # maximum number of IDs, because arrays indexed by ID use memory for all IDs
_TRYING, _TRIED = 10.0, 10_000  # limits of the trial in `_try`: seconds, and characters to encode
_USUAL_ENDS = (END_OF_TEXT, "</s>", "<|end_of_text|>", "<eos>", "<|eos|>", "[SEP]")


@dataclass(frozen=True)
class TextTokenizer:
    """A tokenizer of documents. Special tokens are not parsed: `<|endoftext|>` in a document is plain text."""

    backend: Tokenizer
    end: str  # the token that ends a document
    copy: Callable[[Path], object] | None = None  # copies the original tokenizer files into a folder
    chat_template: str | None = None  # Jinja template that replaces the template in the tokenizer files

    def __post_init__(self) -> None:
        if self.backend.token_to_id(self.end) is None:
            raise DataError(f"the tokenizer has no token {self.end!r}, the end-of-text token in its configuration")
        if self.vocab_size > _MOST_IDS:
            raise DataError(f"the tokenizer has the ID {self.vocab_size - 1}; at most {_MOST_IDS} IDs are supported")
        self.backend.no_truncation()
        self.backend.no_padding()
        self.backend.encode_special_tokens = True

    @cached_property
    def vocab_size(self) -> int:
        """An upper bound: all IDs are below this number."""
        return 1 + max(self.backend.get_vocab().values())

    @cached_property
    def end_id(self) -> int:
        return self.backend.get_vocab()[self.end]

    @cached_property
    def _process(self) -> LimitedProcess:
        return LimitedProcess(self.compute, "the tokenizer")

    def compute(self, given: list[str] | tuple[list[list[int]], bool]) -> Any:
        """Encode texts as arrays, or decode (rows of IDs, skip special tokens), in this process."""
        if isinstance(given, tuple):
            return self.backend.decode_batch(given[0], skip_special_tokens=given[1])
        return [array("I", e.ids) for e in self.backend.encode_batch_fast(given, add_special_tokens=False)]

    def encode(self, text: str) -> list[int]:
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """Encode the texts in a separate process with limits. The process uses all cores and computes no offsets."""
        return [ids.tolist() for ids in self._process(texts, sum(map(len, texts)))]

    def decode(self, ids: list[int], *, words: bool = False) -> str:
        """Decode IDs in a separate process with limits. words: skip special tokens."""
        return self.decode_batch([ids], words=words)[0]

    def decode_batch(self, rows: list[list[int]], *, words: bool = False) -> list[str]:
        """Decode rows of IDs in a separate process with limits. words: skip special tokens."""
        return self._process((rows, words), sum(map(len, rows)))

    def save(self, folder: Path) -> None:
        """Write a folder that transformers' AutoTokenizer.from_pretrained can open."""
        folder.mkdir(parents=True, exist_ok=True)
        if self.copy is not None:
            self.copy(folder)
        else:
            special = dict.fromkeys(("bos_token", "eos_token", "unk_token"), self.end)
            write_json(
                folder / CONFIG,
                {"tokenizer_class": "PreTrainedTokenizerFast", **special, "clean_up_tokenization_spaces": False},
            )
        if self.copy is None or not (folder / TOKENIZER).exists():
            self.backend.save(str(folder / TOKENIZER))
        if self.chat_template is not None:
            (folder / CHAT_TEMPLATE).write_text(self.chat_template, encoding="utf-8")


def load_tokenizer(spec: str | Path) -> TextTokenizer:
    """Load a tokenizer from a folder (tokenizer.json, or GPT-2's vocab.json and merges.txt), a file, or the Hub.

    In a folder of prepared data, load the tokenizer in the subfolder `tokenizer`; in a run's folder, load the tokenizer
    of the last checkpoint. A file of a model is converted, as for `model.pretrained`. Raises DataError if there is no
    such tokenizer, or if it has no end-of-text token.
    """
    path = as_folder(Path(spec).expanduser())
    if path.exists() and not path.is_dir():
        return _from_file(path, {})
    if not path.exists():
        if Path(spec).is_absolute() or str(spec).startswith((".", "~")):
            raise DataError(f"there is no tokenizer at {spec}")
        return _from_transformers(str(spec))
    path = path / "tokenizer" if (path / "tokenizer").is_dir() else last_checkpoint(path)
    config = _read_json(path / CONFIG) if (path / CONFIG).exists() else {}
    if (path / TOKENIZER).exists():
        return _from_file(path / TOKENIZER, config)
    gpt2_files = (path / "vocab.json", path / "merges.txt")
    if all(map(Path.exists, gpt2_files)) and "GPT2" in str(config.get("tokenizer_class", "GPT2")):
        loaded = load_gpt2(*gpt2_files)
        return replace(loaded, copy=_copier(path)) if config else loaded
    if not any((path / name).exists() for name in TOKENIZER_FILES):
        raise DataError(f"there is no tokenizer in {path}")
    return _from_transformers(str(path))


def warn_if_rebuilt(spec: str) -> None:
    """Warn if transformers' class for a tokenizer folder encodes differently from the folder's tokenizer.json."""
    path = as_folder(Path(spec).expanduser())
    if not spec or not (path / CONFIG).is_file() or not (path / TOKENIZER).is_file():
        return
    config = _read_json(path / CONFIG)
    reads_it = config.get("tokenizer_class") in (None, "PreTrainedTokenizerFast", "TokenizersBackend")
    if reads_it and not (path / "config.json").is_file():  # a config.json may select a different tokenizer class
        return
    try:
        own, theirs = _from_file(path / TOKENIZER, config), _from_transformers(str(path))
        text = own.decode(list(range(own.backend.get_vocab_size())), words=True)  # every token once
        if theirs.encode(text) != own.encode(text):
            log.warning(
                "transformers' AutoTokenizer encodes differently from the tokenizer.json in %s; tokenizer.json is used "
                "here; to load this file, use transformers.PreTrainedTokenizerFast.from_pretrained",
                spec,
            )
    except LimitError as error:
        log.warning("transformers' AutoTokenizer cannot open %s: %s", spec, error)
    except DataError:  # transformers finds no tokenizer, so there is nothing to compare
        return


# Keys of a checkpoint's tokenizer_config.json that are passed to transformers. No key names a file, URL or class.
_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_PLAIN = (
    *("model_max_length", "padding_side", "truncation_side", "clean_up_tokenization_spaces", "split_special_tokens"),
    "chat_template",
)


def stored_tokenizer(folder: Path) -> dict[str, Any]:
    """Return arguments for transformers' PreTrainedTokenizerFast, from the tokenizer's files in a checkpoint.

    Raises DataError if the files cannot be read, or if the tokenizer needs code of its own.
    """
    import transformers

    config = _read_json(folder / CONFIG)
    if "auto_map" in config and not hasattr(transformers, str(config.get("tokenizer_class"))):
        raise DataError(f"{folder / CONFIG} requires code that comes with the tokenizer, which is not run")
    arguments = {key: config[key] for key in _PLAIN if config.get(key) is not None}
    arguments |= {key: _content(config[key]) for key in _SPECIAL if config.get(key) is not None}
    more = config.get("extra_special_tokens") or config.get("additional_special_tokens")
    if isinstance(more, list):
        arguments["extra_special_tokens"] = [_content(token) for token in more]
    if (template := folder / CHAT_TEMPLATE).exists():
        arguments["chat_template"] = _read(template).decode()
    return arguments | {"tokenizer_object": _backend(folder / TOKENIZER)}


def _content(token: Any) -> str:
    return str(token["content"] if isinstance(token, dict) else token)


def load_gpt2(vocab_file: str | Path, merge_file: str | Path) -> TextTokenizer:
    """Load GPT-2's byte-level BPE from its two files, as Megatron-LM does."""
    for path in (vocab_file, merge_file):
        check_source(f"the tokenizer {path}")
        if not Path(path).is_file():
            raise DataError(f"the tokenizer file {path} does not exist, or is not a regular file")
    with explained(f"{vocab_file} and {merge_file} are not a BPE vocabulary and its merges", DataError):
        return byte_level(Tokenizer(models.BPE.from_file(str(vocab_file), str(merge_file))))


def vocabulary(path: Path) -> dict[str, int]:
    """Return token -> ID of a tokenizer.json, including added tokens. Raises DataError if the file cannot be read."""
    return _backend(path).get_vocab(with_added_tokens=True)


def cached_folder(tokenizer: TextTokenizer, spec: str = "") -> Path:
    """Save the tokenizer in a folder under $XDG_CACHE_HOME/crosstrain, named after the hash of its files.

    When the folder is new, `warn_if_rebuilt` checks `spec`, the source of the tokenizer.
    """
    cache = cache_folder("tokenizers")
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as partial:
        new = Path(partial) / "new"
        tokenizer.save(new)
        digest = hashlib.sha256()
        for path in sorted(new.iterdir()):  # hash all files: two tokenizers may differ only in their chat templates
            data = path.read_bytes()
            digest.update(f"{path.name}/{len(data)}/".encode() + data)
        folder = cache / digest.hexdigest()[:16]
        try:
            os.rename(new, folder)
        except OSError:
            if not folder.exists():  # an existing folder has the same content
                raise
        else:
            warn_if_rebuilt(spec)
    return folder


@lru_cache(maxsize=8)
def load_cached(spec: str) -> tuple[TextTokenizer, Path]:
    """Load a tokenizer and return it with its `cached_folder`."""
    tokenizer = load_tokenizer(spec)
    return tokenizer, cached_folder(tokenizer, spec)


def byte_level(tokenizer: Tokenizer) -> TextTokenizer:
    """Turn a BPE model into a tokenizer like GPT-2's; `<|endoftext|>` is added if the vocabulary lacks it."""
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    tokenizer.add_special_tokens([END_OF_TEXT])  # gets the last ID, unless the vocabulary already has this token
    return TextTokenizer(tokenizer, END_OF_TEXT)


def _from_file(path: Path, config: dict) -> TextTokenizer:
    backend = _backend(path)
    end = config.get("eos_token")
    usual = (token for token in _USUAL_ENDS if backend.token_to_id(token) is not None)
    end = (_content(end) if end else None) or next(usual, None)
    if end is None:
        raise DataError(f"{path} has no end-of-text token: set eos_token in tokenizer_config.json next to it")
    return TextTokenizer(backend, end, _copier(path.parent) if config else None)


def _copier(source: Path) -> Callable[[Path], None]:
    return lambda folder: copy_files(plain_files(source, TOKENIZER_FILES), folder)


_tried = set[str]()  # hashes of files that passed `_try`


def _backend(path: Path) -> Tokenizer:
    """Load a tokenizer.json after a trial in a process with limits. Raises DataError for any other file."""
    data = _read(path)
    if (digest := hashlib.sha256(data).hexdigest()) not in _tried:
        LimitedProcess(partial(_try, path), f"the tokenizer {path}", seconds=_TRYING)(data)
        _tried.add(digest)
    return Tokenizer.from_buffer(data)


def _try(path: Path, data: bytes) -> None:
    """Load a tokenizer, decode all its tokens and encode some text. Most malicious files exceed the limits here."""
    with explained(f"{path} is not a tokenizer", DataError):
        tokenizer = Tokenizer.from_buffer(data)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    text = tokenizer.decode(list(tokenizer.get_vocab().values()), skip_special_tokens=False)
    tokenizer.encode(text[:_TRIED], add_special_tokens=False)


def _from_transformers(spec: str) -> TextTokenizer:
    check_source(f"the tokenizer {spec}")
    from transformers import AutoTokenizer

    plain_files(Path(spec), TOKENIZER_FILES | MODEL_FILES)
    backend, end, files = LimitedProcess(partial(_rebuilt, AutoTokenizer), f"the tokenizer {spec}", seconds=15.0)(spec)

    def copy(folder: Path) -> None:
        for name, content in files.items():
            (folder / name).write_bytes(content)

    return TextTokenizer(Tokenizer.from_str(backend), end, copy)


def _rebuilt(kind: Any, spec: str) -> tuple[str, str, dict[str, bytes]]:
    """Return the tokenizer.json of transformers' tokenizer, its end-of-text token, and its files by name."""
    try:
        tokenizer = kind.from_pretrained(spec, trust_remote_code=False)
    except (OSError, ValueError) as error:
        said = f"there is no tokenizer {spec!r}, as a folder or on the Hugging Face Hub: {first_line(error)}"
        raise DataError("; ".join(filter(None, (said, near(Path(spec).expanduser()))))) from None
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or tokenizer.eos_token is None:
        lack = "fast (Rust) version" if backend is None else "end-of-text token (eos_token)"
        raise DataError(f"the tokenizer {spec!r} has no {lack}")
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        files = {path.name: path.read_bytes() for path in Path(folder).iterdir()}
    return backend.to_str(), tokenizer.eos_token, files


def _read_json(path: Path) -> dict:
    with explained(f"{path} is not JSON", DataError):
        found = json.loads(_read(path))
    if not isinstance(found, dict):
        raise DataError(f"{path} is not a JSON object")
    return found


def _read(path: Path) -> bytes:
    with os_errors_as(DataError, f"{path} cannot be read"):
        return read_regular(path, _MAX_BYTES)
