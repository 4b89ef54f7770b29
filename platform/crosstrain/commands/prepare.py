"""`crosstrain prepare`: text in, memory-mapped tokens out; or whatever a named dataset makes."""

from __future__ import annotations

import argparse
from dataclasses import fields
from functools import reduce
from pathlib import Path

from crosstrain.check import Checker, defaults, options_class
from crosstrain.data.prepare import PrepareOptions
from crosstrain.data.prepare import prepare as make
from crosstrain.errors import UserError
from crosstrain.layers import merge, read_options
from crosstrain.registry import registry


def prepare(arguments: argparse.Namespace) -> int:
    """Make the folder that `arguments.output` names; returns the exit code."""
    if arguments.dataset is not None:
        return _prepare_dataset(arguments.dataset, arguments.output, arguments.options)
    if not arguments.input:
        raise UserError("prepare: --input is required, or the name of a dataset that makes its own files")
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


def _prepare_dataset(name: str, output: str, options: list[str]) -> int:
    """Let the registered dataset make its files in `output`, as a project file with these options would."""
    dataset = registry.get_dataset_class(name)
    cls = options_class("dataset", dataset)
    if not {"path", "prepare"} & {f.name for f in fields(cls)}:
        raise UserError(f"prepare: the dataset {name} makes no files")
    given = read_options(options)
    place = {"path": output} if "path" in {f.name for f in fields(cls)} else {"prepare": {"output": output}}
    tree = reduce(merge, [defaults(cls), place, given.tree])
    dataset.prepare(Checker(lambda key: f"prepare {name}: {'.'.join(key)}").dataclass(cls, tree, ()))
    print(f"{output}: ready; train on it with datasets.<label>: {{name: {name}, ...}}")
    return 0
