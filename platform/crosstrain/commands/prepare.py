"""`crosstrain prepare`: text in, memory-mapped tokens out."""

from __future__ import annotations

import argparse
from pathlib import Path

from crosstrain.data.prepare import PrepareOptions
from crosstrain.data.prepare import prepare as make


def prepare(arguments: argparse.Namespace) -> int:
    """Make the folder that `arguments.output` names; returns the exit code."""
    options = PrepareOptions(
        input=arguments.input if len(arguments.input) > 1 else arguments.input[0],
        text_key=arguments.text_key,
        separator=arguments.separator,
        tokenizer=arguments.tokenizer,
        train_tokenizer=arguments.train_tokenizer,
        min_tokens=arguments.min_tokens,
    )
    summary = make(options, Path(arguments.output), overwrite=arguments.overwrite)
    print(
        f"{arguments.output}: {summary.documents:,} documents, {summary.tokens:,} tokens ({summary.dtype}), vocabulary "
        f"{summary.vocab_size:,}" + (f", {summary.dropped:,} short documents dropped" if summary.dropped else "")
    )
    print(f"train on it with datasets.<name>.path={arguments.output} and model.vocab_size={summary.vocab_size}")
    return 0
