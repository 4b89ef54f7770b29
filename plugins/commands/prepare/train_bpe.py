"""Train a byte-level BPE tokenizer."""

from collections.abc import Iterable

from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from crosstrain import TextTokenizer
from crosstrain.data.tokenizer import byte_level

_LONG = 1000  # bytes; longer words are split for training, because merging takes time quadratic in their length


def train_bpe(texts: Iterable[str], vocab_size: int, progress: bool = False) -> TextTokenizer:
    """Train a byte-level BPE like GPT-2's (Radford et al. 2019), with `<|endoftext|>` as its last ID.

    vocab_size: 257 to 1,048,576; includes the 256 bytes, the merges and `<|endoftext|>`. The vocabulary is smaller if
    too few pairs of tokens occur at least twice in the texts.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.ByteLevel(add_prefix_space=False), pre_tokenizers.FixedLength(_LONG)]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 1,
        min_frequency=2,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=progress,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return byte_level(tokenizer)
