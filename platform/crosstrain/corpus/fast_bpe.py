"""The fastest way to a tokenizer's ids: tiktoken where its ids are provably the tokenizer's own, else the tokenizer.

tiktoken merges any two neighbours whose concatenation is a token, the earliest token first; a Hugging Face BPE merges
the pairs in its list, the earliest first. They agree on every text if (`_ranks` checks all of it)

1. the tokens are the 256 bytes and one product of each merge, all different, plus added tokens;
2. each merge joins bytes or products of earlier merges;
3. the merges turn the bytes of each product, alone, into that product.

For suppose that they first differ where tiktoken joins x and y into s, whose merge is another pair. All earlier merges
are done, and none reached across an end of s. So the same merges lead from the bytes of s alone to x and y, where the
only merge that could follow is that of x and y; by 3 there is one and it gives s; by 1 it is the only one that does.

What is merged is decided by a regular expression before. Only expressions known to mean the same to both libraries are
accepted, and documents with characters on whose class their Unicode tables may differ go to the tokenizer itself.
"""

from __future__ import annotations

import json
import logging
import re
import unicodedata
from functools import cache
from itertools import chain
from typing import Any

import numpy as np

from crosstrain.data.tokenizer import TextTokenizer
from crosstrain.utils.optional_deps import absent_package

GPT2 = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_KNOWN = {_LLAMA3, _QWEN2}
_CHANGES = ("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix", "fuse_unk", "byte_fallback")
_log = logging.getLogger(__name__)


class FastEncoder:
    """Encodes documents as `tokenizer.encode_batch` does."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self.tokenizer = tokenizer
        self.fast = _tiktoken(tokenizer)
        self.normalizes = tokenizer.backend.normalizer is not None
        added = _added(tokenizer)
        self.added = re.compile("|".join(map(re.escape, added))) if added else None

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        """Token ids of each document, without an end-of-text token."""
        if self.fast is None:
            return [np.asarray(ids, np.int64) for ids in self.tokenizer.encode_batch(texts)]
        encoding, table = self.fast
        found = []
        for text in texts:
            try:
                found.append(table[encoding(text)] if self._is_plain(text) else self._slowly(text))
            except ValueError:  # a run of a million spaces, through which the expression would have to go back
                found.append(self._slowly(text))
        return found

    def _slowly(self, text: str) -> np.ndarray:
        return np.asarray(self.tokenizer.encode(text), np.int64)

    def _is_plain(self, text: str) -> bool:
        """Whether both libraries see the same in a text."""
        if self.added is not None and self.added.search(text):
            return False
        if text.isascii():
            return True
        if self.normalizes and not unicodedata.is_normalized("NFC", text):
            return False
        return not _unsure()[np.frombuffer(text.encode("utf-32-le"), np.uint32)].any()


def _tiktoken(tokenizer: TextTokenizer) -> tuple[Any, np.ndarray] | None:
    """(text -> ranks, rank -> id), or None where nothing proves them right, or tiktoken is not installed."""
    document = json.loads(tokenizer.backend.to_str())
    pattern = _pattern(document)
    if pattern is None or (ranks := _ranks(document, tokenizer)) is None:
        return None
    try:
        import tiktoken
    except ModuleNotFoundError as error:
        if absent_package(error) is None:
            raise
        _log.warning("tokenizing would be faster with tiktoken: pip install 'crosstrain[corpus]'")
        return None
    order, table = ranks
    encoding = tiktoken.Encoding("corpus", pat_str=pattern, mergeable_ranks=order, special_tokens={})
    buffer, nothing = encoding._core_bpe.encode_to_tiktoken_buffer, set[str]()
    return lambda text: np.frombuffer(buffer(text, nothing), np.uint32), table


def _pattern(document: dict[str, Any]) -> str | None:
    """The expression that cuts text into words, if it is one that both libraries understand alike."""
    model, cutter = document["model"], document["pre_tokenizer"]
    plain = model["type"] == "BPE" and not any(model.get(key) for key in _CHANGES)
    if not plain or cutter is None or document["normalizer"] not in (None, {"type": "NFC"}):
        return None
    steps = cutter["pretokenizers"] if cutter["type"] == "Sequence" else [cutter]
    last = steps[-1]
    if last["type"] != "ByteLevel" or last["add_prefix_space"]:
        return None
    if len(steps) == 1:
        return GPT2 if last.get("use_regex", True) else None
    first = steps[0]
    isolated = first["type"] == "Split" and first["behavior"] == "Isolated" and not first["invert"]
    known = isolated and first["pattern"].get("Regex") in _KNOWN
    return first["pattern"]["Regex"] if len(steps) == 2 and known and not last.get("use_regex", True) else None


def _ranks(document: dict[str, Any], tokenizer: TextTokenizer) -> tuple[dict[bytes, int], np.ndarray] | None:
    """(bytes of a token -> its rank, rank -> id) if conditions 1 to 3 hold."""
    vocabulary: dict[str, int] = document["model"]["vocab"]
    merges = [tuple(pair.split(" ")) if isinstance(pair, str) else tuple(pair) for pair in document["model"]["merges"]]
    characters = _byte_characters()
    seen = dict.fromkeys(characters)
    for pair in merges:
        if len(pair) != 2 or pair[0] not in seen or pair[1] not in seen or pair[0] + pair[1] in seen:
            return None
        seen[pair[0] + pair[1]] = None
    added = {token["content"] for token in document["added_tokens"]}
    if not seen.keys() <= vocabulary.keys() or not vocabulary.keys() - seen.keys() <= added:
        return None
    model = _without_shortcut(document, tokenizer)
    if any(len(found := model.tokenize(token)) != 1 or found[0].value != token for token in seen):
        return None
    to_byte = {character: byte for byte, character in enumerate(characters)}
    order = {bytes(to_byte[c] for c in token): rank for rank, token in enumerate(seen)}
    return order, np.array([vocabulary[token] for token in seen], np.int64)


def _without_shortcut(document: dict[str, Any], tokenizer: TextTokenizer) -> Any:
    """The model, made to merge even what is a token as it stands."""
    if not document["model"].get("ignore_merges"):
        return tokenizer.backend.model
    from tokenizers import Tokenizer

    changed = document | {"model": document["model"] | {"ignore_merges": False}}
    return Tokenizer.from_str(json.dumps(changed)).model


@cache
def _byte_characters() -> list[str]:
    """The character that stands for each byte in a byte-level vocabulary (Radford et al. 2019, `bytes_to_unicode`)."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in visible else chr(next(others)) for byte in range(256)]


def _added(tokenizer: TextTokenizer) -> list[str]:
    """Added tokens that are found in text: all but the special ones, which are text like any other."""
    return [t.content for t in tokenizer.backend.get_added_tokens_decoder().values() if not t.special]


@cache
def _unsure() -> np.ndarray:
    """bool [1,114,112]: characters that send a document to the tokenizer itself.

    Unicode tables may differ about their class: letters, digits and spaces that were not such in Unicode 3.2, which
    Python carries; what became something else since; what is not assigned in this Python's version; and letters whose
    case folds to ASCII.
    """
    old, table = unicodedata.ucd_3_2_0.category, np.zeros(0x110000, bool)
    table[[0x17F, 0x212A]] = True
    table[0x323B0:0xE0000] = table[0xE01F0:0xF0000] = True  # not assigned up to Unicode 16
    # Without private use, which is so for ever.
    for code in chain(range(128, 0xD800), range(0xF900, 0x323B0), range(0xE0000, 0xE01F0)):
        now, before = unicodedata.category(chr(code)), old(chr(code))
        table[code] |= now == "Cn" or (now[0] != before[0] and (now[0] in "LNZ" or before[0] in "LNZ"))
    return table
