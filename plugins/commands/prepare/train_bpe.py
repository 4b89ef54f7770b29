"""Train a byte-level BPE."""

import re
from collections.abc import Iterable, Iterator
from itertools import chain

from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from crosstrain import DataError
from crosstrain.data.tokenizer import END_OF_TEXT, TextTokenizer, byte_level

_MAX_VOCABULARY = 1 << 20
_LONG = 1000  # longer words are split for training, because merging takes time quadratic in their length
_LONG_WORDS = re.compile(rf"(?<!\S)\S{{{_LONG},}}|(?<!\s)\s{{{_LONG},}}")


def train_bpe(texts: Iterable[str], vocab_size: int, progress: bool = False) -> TextTokenizer:
    """Train a byte-level BPE like GPT-2's (Radford et al. 2019), with `<|endoftext|>` as its last ID.

    vocab_size includes the 256 bytes, the merges and `<|endoftext|>`. The result has fewer tokens if too few pairs
    occur at least twice in the texts. Raises DataError if vocab_size is below 257 or above 1,048,576.
    """
    if vocab_size < 257:
        raise DataError(f"a vocabulary of {vocab_size} is too small: 256 bytes and {END_OF_TEXT} need 257")
    if vocab_size > _MAX_VOCABULARY:  # the Rust library allocates memory for all of them at once
        raise DataError(f"a vocabulary of {vocab_size} is too large: at most {_MAX_VOCABULARY} can be trained")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 1,
        min_frequency=2,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=progress,
    )
    tokenizer.train_from_iterator(chain.from_iterable(map(_in_parts, texts)), trainer)
    return byte_level(tokenizer)


def _in_parts(text: str) -> Iterator[str]:
    """Split a text inside words longer than `_LONG` characters, and yield the parts."""
    start = 0
    for found in _LONG_WORDS.finditer(text):
        for stop in range(found.start() + _LONG, found.end(), _LONG):
            yield text[start:stop]
            start = stop
    yield text[start:]
