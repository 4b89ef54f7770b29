"""Files in a model folder other than the weights: their names, and functions to copy them.

A tokenizer's folder often holds a whole model. Only the files listed here are copied from such a folder.
"""

import json
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from crosstrain.utils.errors import DataError
from crosstrain.utils.files import open_regular, read_regular, write_json
from crosstrain.utils.logging import log

# Files that tokenizers and processors of transformers read: JSON, text, and protobuf vocabularies.
TOKENIZER_FILES = frozenset(
    {
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "added_tokens.json",
        "chat_template.jinja",
        "chat_template.json",
        "preprocessor_config.json",
        "processor_config.json",
        "video_preprocessor_config.json",
        "audio_tokenizer_config.json",
        "vocab.json",
        "vocab.txt",
        "merges.txt",
        "bpe.codes",
        "dict.txt",
        "emoji.json",
        "normalizer.json",
        "entity_vocab.json",
        "byte_maps.json",
        "word_shape.json",
        "word_pronunciation.json",
        "vocab-src.json",
        "vocab-tgt.json",
        "target_vocab.json",
        "prophetnet.tokenizer",
        "tokenizer.model",
        "spiece.model",
        "sentencepiece.model",
        "sentencepiece.bpe.model",
        "spm.model",
        "spm_char.model",
        "source.spm",
        "target.spm",
        "tiktoken.model",
        "qwen.tiktoken",
        "tekken.json",
    }
)
GENERATION_CONFIG = "generation_config.json"
MODEL_FILES = frozenset({"config.json", GENERATION_CONFIG})

_HEAD = 1 << 16  # bytes read to identify a file
_MOST_BYTES = 1 << 28  # maximum size of one file; the largest tokenizers take tens of MB


def plain_files(folder: Path, names: Iterable[str]) -> list[Path]:
    """Return the files with these names that are in `folder`.

    Raises DataError for a file that is larger than 256 MiB, is not a plain file, or is a link that leads out of the
    folder. Links into the folder `blobs` of the hub cache are accepted, because the hub cache stores the files of
    snapshots there.
    """
    paths = [folder / name for name in sorted(names) if os.path.lexists(folder / name)]
    home = folder.resolve()
    for path in paths:
        target = path.resolve()
        if not target.is_relative_to(home) and target.parent != home.parent.parent / "blobs":
            raise DataError(
                f"{path} is a link to a file outside its folder, so it is not copied: replace it with the file"
            )
        if not target.is_file() or target.stat().st_size > _MOST_BYTES:
            raise DataError(f"{path} is not a plain file of at most {_MOST_BYTES >> 20} MiB: remove or replace it")
        if misnamed(path):
            raise DataError(f"the contents of {path} do not match its name: remove it, or choose a different folder")
    return paths


# First bytes of SentencePiece files (field 1 of a protobuf message) and of tiktoken files. All others are JSON or text.
_VOCABULARY = re.compile(rb"\n|[A-Za-z0-9+/=]+ \d+\n")
_BEGINNINGS = {".json": re.compile(rb"(\xef\xbb\xbf)?\s*[{\[]"), ".model": _VOCABULARY, ".spm": _VOCABULARY}
_TEXT = re.compile(rb"[^\0\x80][^\0]*\Z|\Z")  # not a pickle, an archive or a program


def misnamed(path: Path) -> bool:
    """Return True if a file's first bytes do not fit the JSON, text or vocabulary that its name indicates."""
    with open_regular(path) as file:
        return not _BEGINNINGS.get(path.suffix, _TEXT).match(file.read(_HEAD))


def end_tokens(settings: Any) -> set[int]:
    """Return the end-of-sequence token IDs in the contents of a generation_config.json, which may be any JSON value."""
    given = settings.get("eos_token_id") if isinstance(settings, dict) else None
    return {token for token in (given if isinstance(given, list) else [given]) if type(token) is int}


def add_end_tokens(path: Path, tokens: Iterable[int]) -> None:
    """Add end-of-sequence token IDs to a generation_config.json, which may not exist yet."""
    settings = json.loads(path.read_bytes()) if path.exists() else {}
    write_json(path, settings | {"eos_token_id": sorted(end_tokens(settings).union(tokens))})


def copy_files(paths: Iterable[Path], folder: Path) -> None:
    """Copy the files from `plain_files` into `folder`. Existing files are kept.

    A file that was deleted in the meantime is skipped with a warning, so that the weights are still saved.
    """
    for path in paths:
        if not (folder / path.name).exists():
            try:
                content = read_regular(path, _MOST_BYTES)
            except OSError as error:
                log.warning("%s: not copied into %s (%s)", path, folder, error)
            else:
                (folder / path.name).write_bytes(content)
