"""Compare `prepare` with tokenizing one document at a time, and measure sample look-up in datasets of growing size.

    python benchmarks/data.py [--rounds 3]

Preparation: the input is the text of the Python standard library; a tokenizer is trained on it before the clock starts.
Look-up: datasets of up to 10^12 tokens are simulated. Only the sample order is computed, because nothing else depends
on the size.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

from common import ROOT, ratio, rounds, standard_library, table

sys.path.insert(0, str(ROOT / "platform"))

from crosstrain_plugins.builtin.commands.prepare.options import PrepareOptions
from crosstrain_plugins.builtin.commands.prepare.prepare import prepare
from crosstrain_plugins.builtin.commands.prepare.train_bpe import train_bpe
from crosstrain_plugins.builtin.datasets.indexed_dataset import TokenWriter, best_dtype

from crosstrain.data.shuffle import sample_index
from crosstrain.data.tokenizer import load_tokenizer


def whole(folder: Path) -> dict[str, float]:
    """Prepare the texts as `crosstrain prepare` does."""
    options = PrepareOptions(input="stdlib", tokenizer=str(folder / "tokenizer"))
    started = time.perf_counter()
    tokens = prepare(options, folder / "prepared", progress=False, overwrite=True).tokens
    return {"tokens_per_second": tokens / (time.perf_counter() - started)}


def one_at_a_time(folder: Path) -> dict[str, float]:
    """Tokenize one document after the other, with the same input, tokenizer and output format."""
    tokenizer = load_tokenizer(str(folder / "tokenizer"))
    started = time.perf_counter()
    with TokenWriter(folder / "plain", best_dtype(tokenizer.vocab_size)) as writer:
        for text in standard_library():
            writer.add([[*tokenizer.encode(text), tokenizer.end_id]])
    return {"tokens_per_second": writer.num_tokens / (time.perf_counter() - started)}


def look_up(tokens: int, length: int = 1024, count: int = 2000) -> float:
    """Return the microseconds per sample index, including the first use of an epoch."""
    samples = tokens // length
    times = []
    for repeat in range(7):
        started = time.perf_counter()
        for n in range(count):
            sample_index(repeat, n * (samples // count), samples)
        times.append((time.perf_counter() - started) / count)
    return 1e6 * statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        train_bpe(standard_library(), 32_000, False).save(folder / "tokenizer")
        ways = {"prepare": whole, "one document at a time": one_at_a_time}
        results = rounds(list(ways), lambda way: ways[way](folder), arguments.rounds)
    print("tokens/s, prepare / one document at a time:", ratio(*results.values(), "tokens_per_second"))
    sizes = [10**k for k in (7, 8, 9, 10, 11, 12)]
    costs = [look_up(size) for size in sizes]
    print()
    print(
        table(
            ["tokens", "look-up / that at 10^7"],
            [[f"{s:.0e}", f"{c / costs[0]:.2f}"] for s, c in zip(sizes, costs, strict=True)],
        )
    )


if __name__ == "__main__":
    main()
