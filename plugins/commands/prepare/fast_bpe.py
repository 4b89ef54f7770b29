"""Encode with tiktoken if its IDs are provably the tokenizer's own, else with the tokenizer itself.

tiktoken merges any two neighbors that together form a token, the token with the lowest rank first. A Hugging Face BPE
merges only the pairs in its list, in the order of the list. Both agree on every text under these conditions (`_ranks`
checks them all):

1. the tokens are the 256 bytes and the result of each merge, all different, plus added tokens;
2. each merge joins bytes or results of earlier merges;
3. applied to only the bytes of a merge's result, the merges produce that result.

Proof: consider the first step in which the two differ. tiktoken joins x and y into s, but the merge that gives s joins
a different pair. All earlier merges are done, and none crossed a boundary of s. So the same merges turn the bytes of s
into x and y, and only a merge of x and y can follow. By 3, this merge exists and gives s; by 1, no other merge gives s:
a contradiction.

First, a regular expression splits the text into words. Only expressions that are known to mean the same in both
libraries are accepted. The two libraries may have different Unicode tables; documents with characters that may be in
different classes are encoded by the tokenizer itself.
"""

import importlib.util
import json
import logging
import re
import unicodedata
from contextlib import suppress
from functools import cache
from itertools import chain
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from crosstrain.data.tokenizer import TextTokenizer

GPT2 = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_NORMALIZERS = (None, {"type": "NFC"})
_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
# Expression -> the pre-tokenizer steps that split text with it.
_CUTTERS = {GPT2: [_BYTES | {"use_regex": True}]} | {
    pattern: [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False, "trim_offsets": True},
        _BYTES | {"use_regex": False},
    ]
    for pattern in (_LLAMA3, _QWEN2)
}
_CHANGES = ("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix", "fuse_unk", "byte_fallback")
_log = logging.getLogger(__name__)


class FastEncoder:
    """Encodes documents with the same result as `tokenizer.encode_batch`."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self.tokenizer = tokenizer
        self.fast = _tiktoken(tokenizer)
        self.normalizes = tokenizer.backend.normalizer is not None
        # Added tokens are matched in documents. Special tokens are not: in a document, they are ordinary text.
        added = [t.content for t in tokenizer.backend.get_added_tokens_decoder().values() if not t.special]
        self.added = re.compile("|".join(map(re.escape, added)) or "(?!)")

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        """Return the token IDs of each document, without an end-of-text token."""
        if self.fast is None:
            return [np.asarray(ids, np.int64) for ids in self.tokenizer.encode_batch(texts)]
        encoding, table = self.fast
        found = []
        for text in texts:
            ranks = None
            with suppress(ValueError):  # a run of a million spaces is too long for the expression's backtracking
                ranks = encoding(text) if self._is_plain(text) else None
            found.append(np.asarray(self.tokenizer.encode(text), np.int64) if ranks is None else table[ranks])
        return found

    def _is_plain(self, text: str) -> bool:
        """Return whether both libraries certainly split a text in the same way."""
        if self.added.search(text) or (self.normalizes and not unicodedata.is_normalized("NFC", text)):
            return False
        return text.isascii() or not _unsure()[np.frombuffer(text.encode("utf-32-le"), np.uint32)].any()


def _tiktoken(tokenizer: TextTokenizer) -> tuple[Any, np.ndarray] | None:
    """Return (text -> ranks, rank -> ID); None if they are not provably right, or tiktoken is missing."""
    document = json.loads(tokenizer.backend.to_str())
    pattern = _pattern(document)
    if pattern is None or (ranks := _ranks(document)) is None:
        return None
    if importlib.util.find_spec("tiktoken") is None:
        _log.warning("tokenizing would be faster with tiktoken: pip install 'crosstrain[corpus]'")
        return None
    import tiktoken

    order, table = ranks
    encoding = tiktoken.Encoding("corpus", pat_str=pattern, mergeable_ranks=order, special_tokens={})
    buffer, nothing = encoding._core_bpe.encode_to_tiktoken_buffer, set[str]()
    return lambda text: np.frombuffer(buffer(text, nothing), np.uint32), table


def _pattern(document: dict[str, Any]) -> str | None:
    """Return the expression that splits text into words; None if the two libraries may split differently."""
    model, cutter = document["model"], document["pre_tokenizer"] or {}
    if model["type"] != "BPE" or any(model.get(key) for key in _CHANGES) or document["normalizer"] not in _NORMALIZERS:
        return None
    # trim_offsets does not affect the tokens.
    steps = [step | {"trim_offsets": True} for step in cutter.get("pretokenizers", [cutter])]
    return next((pattern for pattern, cut in _CUTTERS.items() if cut == steps), None)


def _ranks(document: dict[str, Any]) -> tuple[dict[bytes, int], np.ndarray] | None:
    """Return (bytes of a token -> its rank, rank -> ID) if conditions 1 to 3 hold, else None."""
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
    merging = document | {"model": document["model"] | {"ignore_merges": False}}  # also merge words that are tokens
    model = Tokenizer.from_str(json.dumps(merging)).model
    if any(len(found := model.tokenize(token)) != 1 or found[0].value != token for token in seen):
        return None
    to_byte = {character: byte for byte, character in enumerate(characters)}
    order = {bytes(to_byte[c] for c in token): rank for rank, token in enumerate(seen)}
    return order, np.array([vocabulary[token] for token in seen], np.int64)


@cache
def _byte_characters() -> list[str]:
    """Return the character for each byte in a byte-level vocabulary (Radford et al. 2019, `bytes_to_unicode`)."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in visible else chr(next(others)) for byte in range(256)]


@cache
def _unsure() -> np.ndarray:
    """Return a mask of characters with classes that may differ between Unicode tables, bool [1,114,112].

    These are letters, digits and spaces with a different class in Unicode 3.2 (Python includes its table), characters
    without a class in this version of Python, and letters that fold to ASCII.
    """
    old, table = unicodedata.ucd_3_2_0.category, np.zeros(0x110000, bool)
    table[[0x17F, 0x212A]] = True
    table[0x323B0:0xE0000] = table[0xE01F0:0xF0000] = True  # not assigned up to Unicode 16
    # Private-use characters are omitted: their class never changes.
    for code in chain(range(128, 0xD800), range(0xF900, 0x323B0), range(0xE0000, 0xE01F0)):
        now, before = unicodedata.category(chr(code)), old(chr(code))
        table[code] |= now == "Cn" or (now[0] != before[0] and (now[0] in "LNZ" or before[0] in "LNZ"))
    return table
